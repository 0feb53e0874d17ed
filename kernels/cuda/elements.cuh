// Elements of matrices and how kernels walk over them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/blocks.h"

namespace dmuon::cuda {

template <class T>
struct Of {
  using type = T;
};

// f(Of<T>{}) for the type that `element` stands for.
template <class F>
auto with_element(Element element, F f) {
  if (element == Element::float16) return f(Of<__half>{});
  if (element == Element::bfloat16) return f(Of<__nv_bfloat16>{});
  return f(Of<float>{});
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

inline constexpr int kThreads = 256;
inline constexpr int64_t kMostBlocks = 65535;  // of a grid's y and z

inline unsigned at_most(int64_t blocks, int64_t limit) {
  return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

// One thread per column, rows over y, matrices over z.
inline dim3 grid_over(int64_t batch, int64_t rows, int64_t cols) {
  return dim3(static_cast<unsigned>((cols + kThreads - 1) / kThreads), at_most(rows, kMostBlocks),
              at_most(batch, kMostBlocks));
}

}  // namespace dmuon::cuda

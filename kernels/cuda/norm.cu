#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"

namespace dmuon::cuda {
namespace {

constexpr unsigned kWarp = 32;

__device__ double sum_of_warp(double value) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  return value;
}

// In thread 0.
__device__ double sum_of_block(double value) {
  __shared__ double warps[kThreads / kWarp];
  value = sum_of_warp(value);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (double warp : warps) sum += warp;
  }
  return sum;
}

// No float32 over- or underflows when squared in float64.
template <class T>
__global__ void squares_kernel(const T* x, int64_t elements, int64_t chunks, double* partials) {
  const int64_t matrix = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int64_t length = (elements + chunks - 1) / chunks;
  const int64_t begin = chunk * length;
  const int64_t end = begin + length < elements ? begin + length : elements;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const double value = to_float(x[matrix * elements + i]);
    sum += value * value;
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void factors_kernel(const double* partials, int64_t chunks, double* factors) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < chunks; i += kThreads) sum += partials[blockIdx.x * chunks + i];
  sum = sum_of_block(sum);
  if (threadIdx.x != 0) return;
  const double nan = __longlong_as_double(0x7ff8000000000000ll);
  factors[blockIdx.x] = !isfinite(sum) ? nan : sum == 0 ? 1 : 1 / sqrt(sum);
}

}  // namespace

cudaError_t launch_squares(Element element, const void* x, int64_t batch, int64_t elements,
                           int64_t chunks, double* partials, cudaStream_t stream) {
  with_element(element, [&](auto of) {
    using T = typename decltype(of)::type;
    squares_kernel<<<static_cast<unsigned>(batch * chunks), kThreads, 0, stream>>>(
        static_cast<const T*>(x), elements, chunks, partials);
  });
  return cudaGetLastError();
}

cudaError_t launch_factors(const double* partials, int64_t batch, int64_t chunks, double* factors,
                           cudaStream_t stream) {
  factors_kernel<<<static_cast<unsigned>(batch), kThreads, 0, stream>>>(partials, chunks, factors);
  return cudaGetLastError();
}

}  // namespace dmuon::cuda

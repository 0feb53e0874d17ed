#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"

namespace dmuon::cuda {
namespace {

// value(x, matrix) of the elements that both have, zero for those of `to` alone.
template <class From, class To, class Value>
__device__ void copy_matrices(const From* from, Shape have, To* to, Shape want, Value value) {
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= want.cols) return;
  for (int64_t matrix = blockIdx.z; matrix < want.batch; matrix += gridDim.z) {
    for (int64_t row = blockIdx.y; row < want.rows; row += gridDim.y) {
      const bool inside = row < have.rows && col < have.cols;
      const int64_t source = (matrix * have.rows + row) * have.cols + col;
      to[(matrix * want.rows + row) * want.cols + col] =
          from_float<To>(inside ? value(from[source], matrix) : 0.0f);
    }
  }
}

template <class From, class To>
__global__ void import_kernel(const From* from, Shape have, const double* factors, double scale,
                              To* to, Shape want) {
  copy_matrices(from, have, to, want, [=](From x, int64_t matrix) {
    return static_cast<float>(to_float(x) * (factors[matrix] * scale));
  });
}

template <class From, class To>
__global__ void copy_kernel(const From* from, Shape have, float scale, To* to, Shape want) {
  copy_matrices(from, have, to, want, [=](From x, int64_t) { return to_float(x) * scale; });
}

template <class F>
void with_elements(Element from, Element to, F f) {
  with_element(from, [&](auto one) { with_element(to, [&](auto other) { f(one, other); }); });
}

}  // namespace

cudaError_t launch_import(Element from_element, const void* from, Shape from_shape,
                          const double* factors, double scale, Element to_element, void* to,
                          Shape to_shape, cudaStream_t stream) {
  with_elements(from_element, to_element, [&](auto one, auto other) {
    using From = typename decltype(one)::type;
    using To = typename decltype(other)::type;
    import_kernel<<<grid_over(to_shape.batch, to_shape.rows, to_shape.cols), kThreads, 0, stream>>>(
        static_cast<const From*>(from), from_shape, factors, scale, static_cast<To*>(to), to_shape);
  });
  return cudaGetLastError();
}

cudaError_t launch_copy(Element from_element, const void* from, Shape from_shape, float scale,
                        Element to_element, void* to, Shape to_shape, cudaStream_t stream) {
  with_elements(from_element, to_element, [&](auto one, auto other) {
    using From = typename decltype(one)::type;
    using To = typename decltype(other)::type;
    copy_kernel<<<grid_over(to_shape.batch, to_shape.rows, to_shape.cols), kThreads, 0, stream>>>(
        static_cast<const From*>(from), from_shape, scale, static_cast<To*>(to), to_shape);
  });
  return cudaGetLastError();
}

}  // namespace dmuon::cuda

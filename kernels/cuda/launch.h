// The kernels of ours, as host code launches them: asynchronous, on `stream`, allocating nothing.
// Each returns what the launch itself met. C++17. Matrices are row-major; a batch lies one after
// the other. Sizes may be anything but zero.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/cuda/blocks.h"

namespace dmuon::cuda {

struct Shape {
  int64_t batch, rows, cols;
};

// partials[matrix * chunks + chunk]: the sum of squares of a chunk in float64, always in one order.
cudaError_t launch_squares(Element element, const void* x, int64_t batch, int64_t elements,
                           int64_t chunks, double* partials, cudaStream_t stream);

// factors[matrix] = 1 / sqrt(sum of its partials); 1 for zero, NaN for what is not finite.
cudaError_t launch_factors(const double* partials, int64_t batch, int64_t chunks, double* factors,
                           cudaStream_t stream);

// to = from * factors[matrix] * scale, in float64 up to the last rounding. `to` is as large or
// larger, and zero beyond `from`.
cudaError_t launch_import(Element from_element, const void* from, Shape from_shape,
                          const double* factors, double scale, Element to_element, void* to,
                          Shape to_shape, cudaStream_t stream);

// Mirrors lower triangles, where asked; also[...] = of + diagonal I, where not null.
cudaError_t launch_finish(Element element, void* of, void* also, int64_t batch, int64_t order,
                          float diagonal, bool mirror, cudaStream_t stream);

// to = from * scale; `to` may be smaller, never larger.
cudaError_t launch_copy(Element from_element, const void* from, Shape from_shape, float scale,
                        Element to_element, void* to, Shape to_shape, cudaStream_t stream);

// Writes the four pointer arrays of every list into the workspace.
cudaError_t launch_pointers(const BlockList* lists, int64_t count, void* workspace,
                            cudaStream_t stream);

}  // namespace dmuon::cuda

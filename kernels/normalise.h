// The first thing Newton-Schulz does to a matrix: bring its Frobenius norm to 1.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

// x: [m, n] or [b, m, n], floating point, any strides. A new contiguous float32 tensor of x's shape
// in which every matrix has Frobenius norm 1, whatever its scale was; exact zeros stay zero. A
// matrix that holds a NaN or an infinity becomes all NaN; its neighbours in the batch do not.
at::Tensor normalised(const at::Tensor& x);

}  // namespace dmuon

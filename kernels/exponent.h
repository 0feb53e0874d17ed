// Scaling by powers of two, which rounds nothing.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

// Below any other exponent, so that a matrix of zeros decides nothing: 2^kNoExponent is 0.
inline constexpr double kNoExponent = -4096;

// 2^k exactly, where a pow may be one bit off, and 0 where that is no normal number. k: whole
// numbers in float32, no larger than the exponent range of dtype, float32 or float64.
at::Tensor power_of_two(const at::Tensor& k, at::ScalarType dtype);

struct Scaled {
  at::Tensor x;         // contiguous, each matrix times 2^-exponent: max|x| in [1/2, 1)
  at::Tensor exponent;  // float32 [1, 1] or [b, 1, 1]; kNoExponent for zeros, 0 for non-finite
};

// x: [m, n] or [b, m, n], floating point, any strides, not empty. Rounds only to `dtype`.
Scaled scaled_to_one(const at::Tensor& x, at::ScalarType dtype);

}  // namespace dmuon

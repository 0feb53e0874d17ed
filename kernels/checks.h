// What both Newton-Schulz implementations ask of their input.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

// Throws ConfigError unless x is [m, n] or [b, m, n] and floating point.
void require_matrices(const at::Tensor& x);

}  // namespace dmuon

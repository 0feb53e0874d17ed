// What all Newton-Schulz implementations ask of their input and options.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

struct CoefficientSet;

// Throws ConfigError unless x is [m, n] or [b, m, n] and floating point.
void require_matrices(const at::Tensor& x);

// Throws ConfigError where `steps` rows of the set, or all that it names if those are more, map
// singular values in (0, 1.005] to negative ones or to ones above 1.5. The set that passed last is
// not looked at again.
void require_tame(const CoefficientSet& set, int steps);

}  // namespace dmuon

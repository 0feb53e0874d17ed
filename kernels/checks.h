// What all Newton-Schulz implementations ask of their input and options.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

struct CoefficientSet;

// The most steps, and the most rows of a set: far more than any published set has, few enough that
// following them takes no time.
constexpr int kMostSteps = 1000;

// Throws ConfigError unless x is [m, n] or [b, m, n] of float64, float32, bfloat16 or float16, lies
// in strided memory of its own and has all of it: no tensor that only stands for others (a DTensor,
// a FakeTensor), and none whose storage has been freed. `name` is what the error calls it.
void require_matrices(const at::Tensor& x, const char* name = "a tensor");

// Throws ConfigError while torch traces what runs (torch.jit.trace, make_fx, torch.export): it
// records torch's operations, which kernels of our own are not, and would play back their buffers
// as they were allocated.
void require_not_traced();

// Throws ConfigError where `steps` rows of the set, or all that it names if those are more, map
// singular values in (0, 1.005] to negative ones or to ones above 1.5, or pass 1,000 on the way.
// The set that passed last is not looked at again.
void require_tame(const CoefficientSet& set, int steps);

}  // namespace dmuon

// Runs a plan of kernels/cuda on the CPU, in its precisions, from the same offsets, pointers and
// column-major calls that a GPU is given.
#pragma once
#include <ATen/core/Tensor.h>

#include "kernels/cuda/plan.h"

namespace dmuon {

// x: float32, contiguous, of the plan's problem. Returns float32 of x's sizes. Workspace begins as
// NaN: what a plan reads before it writes shows.
at::Tensor interpret(const cuda::Plan& plan, const at::Tensor& x);

}  // namespace dmuon

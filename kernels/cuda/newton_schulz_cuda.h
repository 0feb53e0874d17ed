// Newton-Schulz on CUDA tensors: plans and executors for torch's streams and memory.
#pragma once
#include <ATen/core/Tensor.h>

#include "kernels/cuda/executor.h"
#include "kernels/newton_schulz.h"

namespace dmuon::cuda {

// DeviceNewtonSchulz::run. NsDtype::automatic is float16. Takes float32, float16 and bfloat16 on
// compute capability 8.0 and newer, and warns once per shape where cuBLASLt knows no algorithm; for
// anything else the result is undefined. A graph may capture it once the same shape has been called
// outside. Executors are kept for as long as the process lives: one per shape, options and device.
at::Tensor newton_schulz(const at::Tensor& x, const NewtonSchulz& options);

// DeviceNewtonSchulz::name, e.g. "gram/cublaslt, 8 blocks/float16".
std::string kernel_name(int64_t batch, int64_t rows, int64_t cols, const NewtonSchulz& options);

// The pieces, for whoever wants a plan of his own.
Machine current_machine();

// One output and one workspace from the caching allocator. x: contiguous, of the plan's problem.
at::Tensor run(const Executor& executor, const at::Tensor& x);

}  // namespace dmuon::cuda

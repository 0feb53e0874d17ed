// Runs a plan on the current device.
#pragma once
#include <cublasLt.h>

#include <map>
#include <optional>
#include <vector>

#include "kernels/cuda/lt_matmul.h"
#include "kernels/cuda/plan.h"

namespace dmuon::cuda {

// What one run works on. Everything is the caller's, and in use until the stream has passed.
struct Buffers {
  const void* input;
  float* output;
  char* workspace;  // Plan::workspace_bytes, at a multiple of 256
};

// A plan with an algorithm for each of its products. Immutable: threads may share it, each with its
// own handle, stream and buffers.
class Executor {
 public:
  // Nothing where the library has no algorithm for one of the products.
  static std::optional<Executor> make(Plan plan, cublasLtHandle_t library, const Machine& machine);

  // Enqueues everything on `stream` and returns: no synchronisation, no allocation, no copy from
  // the host, so a stream in capture records it. Throws RuntimeFailure.
  void run(cublasLtHandle_t library, const Buffers& buffers, cudaStream_t stream) const;

  const Plan& plan() const { return plan_; }

 private:
  class Runner;
  explicit Executor(Plan plan) : plan_(std::move(plan)) {}

  Plan plan_;
  std::map<MatmulCall, LtMatmul> products_;
};

}  // namespace dmuon::cuda

// One kind of product in cuBLASLt: its layouts and the algorithm that the library's heuristic
// chose, found once and used for every product of that kind.
#pragma once
#include <cublasLt.h>

#include <memory>

#include "kernels/cuda/matmul_call.h"

namespace dmuon::cuda {

struct Destroy {
  void operator()(cublasLtMatmulDesc_t desc) const noexcept { cublasLtMatmulDescDestroy(desc); }
  void operator()(cublasLtMatrixLayout_t layout) const noexcept {
    cublasLtMatrixLayoutDestroy(layout);
  }
  void operator()(cublasLtMatmulPreference_t preference) const noexcept {
    cublasLtMatmulPreferenceDestroy(preference);
  }
};
template <class T>
using Handle = std::unique_ptr<T, Destroy>;

struct Operands {
  const void *a, *b, *c;
  void* d;
};

// Products accumulate in float32, in one order for one algorithm. Immutable once made: any thread
// may run it.
class LtMatmul {
 public:
  // Throws RuntimeFailure where the library refuses a descriptor.
  explicit LtMatmul(const MatmulCall& call);

  // Asks the heuristic; false: the library knows no algorithm for this on the current device.
  bool choose_algorithm(cublasLtHandle_t library, size_t workspace_bytes);

  // Enqueues. Operands lie as MatmulCall says; workspace is the size that was chosen with. Throws
  // RuntimeFailure with what the library says.
  void run(cublasLtHandle_t library, float alpha, float beta, const Operands& operands,
           void* workspace, cudaStream_t stream) const;

 private:
  Handle<cublasLtMatrixLayoutOpaque_t> layout(Element element, int64_t rows, int64_t cols,
                                              int64_t ld, int64_t stride) const;
  Handle<cublasLtMatmulPreferenceOpaque_t> preference(size_t workspace_bytes) const;

  MatmulCall call_;
  Handle<cublasLtMatmulDescOpaque_t> desc_;
  Handle<cublasLtMatrixLayoutOpaque_t> a_, b_, c_, d_;
  cublasLtMatmulAlgo_t algorithm_{};
  size_t workspace_bytes_ = 0;
};

}  // namespace dmuon::cuda

#include "kernels/cuda/lt_matmul.h"

#include "kernels/error.h"

namespace dmuon::cuda {
namespace {

std::string described(const MatmulCall& call) {
  const char* kind = call.pointers ? " by pointers" : "";
  return message("a product of ", call.m, " x ", call.k, " and ", call.k, " x ", call.n, " (",
                 call.count, " times", kind, ")");
}

void require_success(cublasStatus_t status, const char* what, const MatmulCall& call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw RuntimeFailure(message("cuBLASLt: ", what, " failed for ", described(call), ": ",
                               cublasLtGetStatusString(status),
                               ". Take another NsDtype, or go without libdmuon_cuda.so, and report "
                               "the shape."));
}

cudaDataType_t type_of(Element element) {
  if (element == Element::float16) return CUDA_R_16F;
  return element == Element::bfloat16 ? CUDA_R_16BF : CUDA_R_32F;
}

template <class T>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value,
         const MatmulCall& call) {
  require_success(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value),
                  "a layout attribute", call);
}

template <class T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T value,
         const MatmulCall& call) {
  require_success(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value),
                  "a product attribute", call);
}

template <class T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         T value, const MatmulCall& call) {
  require_success(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                  "a preference", call);
}

// CUBLAS_COMPUTE_32F: float32 factors are not rounded to TF32.
Handle<cublasLtMatmulDescOpaque_t> new_desc(const MatmulCall& call) {
  cublasLtMatmulDesc_t desc = nullptr;
  require_success(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product",
                  call);
  Handle<cublasLtMatmulDescOpaque_t> handle(desc);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_TRANSA, call.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
               call);
  set<int32_t>(desc, CUBLASLT_MATMUL_DESC_TRANSB, call.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
               call);
  return handle;
}

}  // namespace

LtMatmul::LtMatmul(const MatmulCall& call)
    : call_(call),
      desc_(new_desc(call)),
      a_(layout(call.factors, call.transpose_a ? call.k : call.m,
                call.transpose_a ? call.m : call.k, call.lda, call.stride_a)),
      b_(layout(call.factors, call.transpose_b ? call.n : call.k,
                call.transpose_b ? call.k : call.n, call.ldb, call.stride_b)),
      c_(layout(call.result, call.m, call.n, call.ldd, call.stride_d)),
      d_(layout(call.result, call.m, call.n, call.ldd, call.stride_d)) {}

Handle<cublasLtMatrixLayoutOpaque_t> LtMatmul::layout(Element element, int64_t rows, int64_t cols,
                                                      int64_t ld, int64_t stride) const {
  cublasLtMatrixLayout_t layout = nullptr;
  require_success(cublasLtMatrixLayoutCreate(&layout, type_of(element), rows, cols, ld), "a layout",
                  call_);
  Handle<cublasLtMatrixLayoutOpaque_t> handle(layout);
  set<int32_t>(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(call_.count),
               call_);
  if (call_.pointers) {
    set<uint32_t>(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, CUBLASLT_BATCH_MODE_POINTER_ARRAY,
                  call_);
  } else {
    set<int64_t>(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride, call_);
  }
  return handle;
}

// Partial sums of a split k stay in float32: in the output's float16 they would round once more.
Handle<cublasLtMatmulPreferenceOpaque_t> LtMatmul::preference(size_t workspace_bytes) const {
  cublasLtMatmulPreference_t preference = nullptr;
  require_success(cublasLtMatmulPreferenceCreate(&preference), "a preference", call_);
  Handle<cublasLtMatmulPreferenceOpaque_t> handle(preference);
  set<uint64_t>(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes, call_);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, call_);
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set<uint32_t>(preference, attribute, static_cast<uint32_t>(call_.alignment), call_);
  }
  return handle;
}

bool LtMatmul::choose_algorithm(cublasLtHandle_t library, size_t workspace_bytes) {
  const auto wanted = preference(workspace_bytes);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(library, desc_.get(), a_.get(), b_.get(), c_.get(), d_.get(),
                                     wanted.get(), 1, &found, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
  require_success(status, "the choice of an algorithm", call_);
  if (count == 0 || found.state != CUBLAS_STATUS_SUCCESS) return false;
  algorithm_ = found.algo;
  workspace_bytes_ = workspace_bytes;
  return true;
}

void LtMatmul::run(cublasLtHandle_t library, float alpha, float beta, const Operands& operands,
                   void* workspace, cudaStream_t stream) const {
  require_success(cublasLtMatmul(library, desc_.get(), &alpha, operands.a, a_.get(), operands.b,
                                 b_.get(), &beta, operands.c, c_.get(), operands.d, d_.get(),
                                 &algorithm_, workspace, workspace_bytes_, stream),
                  "the product", call_);
}

}  // namespace dmuon::cuda

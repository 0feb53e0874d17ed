// A row-major product as cuBLASLt is told of it: column-major, with the operands swapped.
#pragma once
#include <compare>
#include <cstdint>

#include "kernels/cuda/plan.h"

namespace dmuon::cuda {

// D = alpha op(A) op(B) + beta C, column-major, `count` times. C has the layout of D.
struct MatmulCall {
  Element factors = Element::float32, result = Element::float32;
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldd = 0;
  int64_t count = 1;
  bool pointers = false;  // operands are arrays of `count` pointers on the device
  int64_t stride_a = 0, stride_b = 0, stride_d = 0;  // elements; 0 with pointers
  int64_t alignment = 0;  // bytes: a power of two that divides every operand's address, at most 256

  auto operator<=>(const MatmulCall&) const = default;
};

// cuBLASLt's A is the product's b, and its B the product's a. The workspace and the output are
// taken to begin at multiples of 256 bytes.
MatmulCall column_major(const Plan& plan, const Product& product);

}  // namespace dmuon::cuda

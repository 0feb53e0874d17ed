// Which tensors the plain loops of this folder may walk through as one array.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

inline constexpr int64_t kGrain = 32768;  // elements below which a second thread does not pay

inline bool is_flat(const at::Tensor& x, at::ScalarType dtype) {
  return x.is_cpu() && x.scalar_type() == dtype && x.is_contiguous();
}

}  // namespace dmuon

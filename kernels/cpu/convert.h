// Elements of the caller's dtype, float32, bfloat16 or float16, to float32 and back.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/cpu/tile.h"

namespace dmuon::cpu {

inline const void* element(const void* data, at::ScalarType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * (dtype == at::kFloat ? 4 : 2);
}
inline void* element(void* data, at::ScalarType dtype, int64_t index) {
  return static_cast<char*>(data) + index * (dtype == at::kFloat ? 4 : 2);
}

// to = factor * from. `from` points at the first element.
inline void to_float32(const TileKernels& kernels, const void* from, at::ScalarType dtype,
                       float* to, int64_t n, float factor = 1) {
  if (dtype == at::kFloat) {
    kernels.scale(static_cast<const float*>(from), to, n, factor);
  } else if (dtype == at::kBFloat16) {
    kernels.convert.widen_bfloat16(static_cast<const uint16_t*>(from), to, n, factor);
  } else {
    kernels.convert.widen_float16(static_cast<const uint16_t*>(from), to, n, factor);
  }
}

inline void from_float32(const TileKernels& kernels, const float* from, void* to,
                         at::ScalarType dtype, int64_t n) {
  if (dtype == at::kFloat) {
    kernels.scale(from, static_cast<float*>(to), n, 1);
  } else if (dtype == at::kBFloat16) {
    kernels.convert.narrow_to_bfloat16(from, static_cast<uint16_t*>(to), n);
  } else {
    kernels.convert.narrow_to_float16(from, static_cast<uint16_t*>(to), n);
  }
}

}  // namespace dmuon::cpu

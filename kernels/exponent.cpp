#include "kernels/exponent.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <array>
#include <limits>

namespace dmuon {
namespace {

at::Tensor largest_magnitude(const at::Tensor& x) {
  constexpr std::array<int64_t, 2> kMatrix = {-2, -1};
  constexpr double kMaximum = std::numeric_limits<double>::infinity();
  return at::linalg_vector_norm(x, kMaximum, kMatrix, /*keepdim=*/true);
}

// 0 where frexp has nothing to say: for zero, infinity and NaN.
at::Tensor exponent_of(const at::Tensor& largest) {
  const auto [mantissa, exponent] = at::frexp(largest);
  const at::Tensor usual = mantissa.ge(0.5).logical_and_(mantissa.lt(1));
  return exponent.to(at::kFloat).masked_fill_(usual.logical_not(), 0);
}

}  // namespace

at::Tensor power_of_two(const at::Tensor& k, at::ScalarType dtype) {
  const bool wide = dtype == at::kDouble;
  const at::Tensor biased = (k + (wide ? 1023 : 127)).clamp_min_(0);
  const int64_t lowest_bit = int64_t{1} << (wide ? 52 : 23);
  return biased.to(wide ? at::kLong : at::kInt).mul_(lowest_bit).view(dtype);
}

// In two factors: 2^149, which the smallest float32 asks for, is no float32 itself.
Scaled scaled_to_one(const at::Tensor& x, at::ScalarType dtype) {
  const at::Tensor wide = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
  const at::Tensor largest = largest_magnitude(wide);
  const at::Tensor exponent = exponent_of(largest);
  const at::Tensor half = (exponent * -0.5).floor_();
  const at::Tensor partly = wide * power_of_two(half, wide.scalar_type());
  const at::Tensor whole = partly.mul_(power_of_two(-exponent - half, wide.scalar_type()));
  return {whole.to(dtype).contiguous(), exponent.masked_fill(largest.eq(0), kNoExponent)};
}

}  // namespace dmuon

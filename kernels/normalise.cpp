#include "kernels/normalise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <array>
#include <cmath>
#include <limits>

namespace dmuon {
namespace {

double sum_of_squares(const float* x, int64_t n) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = x[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (; i < n; ++i) lanes[0] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

double inverse_norm(double squares) {
  if (!std::isfinite(squares)) return std::numeric_limits<double>::quiet_NaN();
  return squares == 0 ? 1 : 1 / std::sqrt(squares);
}

void scale_into(float* out, const float* x, double factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] * factor);
}

// No float32 overflows or underflows when squared in float64, so max|x| need not be known.
at::Tensor normalised_cpu(const at::Tensor& x) {
  const at::Tensor in = x.to(at::kFloat).contiguous();
  at::Tensor out = at::empty_like(in);
  const int64_t size = in.size(-2) * in.size(-1);
  for (int64_t begin = 0; begin < in.numel(); begin += size) {
    const float* matrix = in.const_data_ptr<float>() + begin;
    const double factor = inverse_norm(sum_of_squares(matrix, size));
    scale_into(out.mutable_data_ptr<float>() + begin, matrix, factor, size);
  }
  return out;
}

at::Tensor one_where_zero(const at::Tensor& x) { return x.masked_fill(x.eq(0), 1); }

// Divides by max|x| before it leaves x's own range: float64 reaches beyond float32.
at::Tensor normalised_by_max(const at::Tensor& x) {
  constexpr std::array<int64_t, 2> kMatrix = {-2, -1};
  const at::Tensor wide = x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
  const at::Tensor largest = one_where_zero(wide.abs().amax(kMatrix, /*keepdim=*/true));
  const at::Tensor scaled = (wide / largest).to(at::kFloat).contiguous();
  return scaled / one_where_zero(at::linalg_vector_norm(scaled, 2, kMatrix, /*keepdim=*/true));
}

}  // namespace

at::Tensor normalised(const at::Tensor& x) {
  const bool fits = x.is_cpu() && x.scalar_type() != at::kDouble;
  return fits ? normalised_cpu(x) : normalised_by_max(x);
}

}  // namespace dmuon

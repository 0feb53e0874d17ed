#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/error.h"
#include "kernels/flat.h"
#include "kernels/sum_pieces.h"

namespace dmuon {
namespace {

constexpr int64_t kBlock = 4096;

// All bits of the exponent set: an infinity or a NaN.
template <class Bits, Bits kExponent, class T>
bool finite(const T* x, int64_t n) {
  static_assert(sizeof(T) == sizeof(Bits));
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    Bits bad = 0;
    for (int64_t i = begin; i < end; ++i) {
      Bits bits;
      std::memcpy(&bits, x + i, sizeof bits);
      bad |= static_cast<Bits>((bits & kExponent) == kExponent);
    }
    if (bad != 0) return false;
  }
  return true;
}

// Eight running sums, added up in a fixed order.
template <class T, class Term>
double sum_terms(const T* x, int64_t n, Term term) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += term(static_cast<double>(static_cast<float>(x[i + lane])));
    }
  }
  for (; i < n; ++i) lanes[0] += term(static_cast<double>(static_cast<float>(x[i])));
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

// Magnitudes order as integers do, with NaN above infinity.
template <class T>
double largest(const T* x, int64_t n) {
  int32_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = static_cast<float>(x[i]);
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits &= std::numeric_limits<int32_t>::max();
    top = bits > top ? bits : top;
  }
  float value;
  std::memcpy(&value, &top, sizeof value);
  return value;
}

template <class T>
double powers(const T* x, int64_t n, double p) {
  if (std::isinf(p)) return largest(x, n);
  if (p == 2) return sum_terms(x, n, [](double v) { return v * v; });
  if (p == 1) return sum_terms(x, n, [](double v) { return std::abs(v); });
  if (p == 0) return sum_terms(x, n, [](double v) { return v == 0 ? 0.0 : 1.0; });
  return sum_terms(x, n, [p](double v) { return std::pow(std::abs(v), p); });
}

double powers_by_tensors(const at::Tensor& x, double p) {
  if (x.numel() == 0) return 0;
  const at::Tensor magnitude = x.to(at::kDouble).abs();
  if (std::isinf(p)) return magnitude.max().item<double>();
  if (p == 0) return magnitude.ne(0).sum().item<double>();
  return magnitude.pow(p).sum().item<double>();
}

}  // namespace

bool all_finite(const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  if (is_flat(x, at::kFloat)) {
    return finite<uint32_t, 0x7f800000>(x.const_data_ptr<float>(), x.numel());
  }
  if (is_flat(x, at::kBFloat16)) {
    return finite<uint16_t, 0x7f80>(x.const_data_ptr<c10::BFloat16>(), x.numel());
  }
  return at::isfinite(x).all().item<bool>();
}

double sum_of_powers(const at::Tensor& x, double p) {
  const at::NoGradGuard no_grad;
  if (!(p >= 0)) {
    throw ConfigError(message("sum_of_powers: p is ", p, "; a norm of order 0 or more is wanted."));
  }
  if (is_flat(x, at::kFloat)) return powers(x.const_data_ptr<float>(), x.numel(), p);
  if (is_flat(x, at::kBFloat16)) return powers(x.const_data_ptr<c10::BFloat16>(), x.numel(), p);
  return powers_by_tensors(x, p);
}

}  // namespace dmuon

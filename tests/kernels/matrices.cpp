#include "tests/kernels/matrices.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_svd.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace dmuon {

at::Tensor random_matrix(std::vector<int64_t> sizes, uint64_t seed) {
  at::Tensor x = at::empty(sizes, at::kDouble);
  std::mt19937_64 engine(seed);
  double* data = x.mutable_data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) data[i] = std::ldexp(engine() >> 11, -52) - 1;
  return x;
}

at::Tensor with_spectrum(const std::vector<double>& sigma, int64_t rows, int64_t cols) {
  const auto k = static_cast<int64_t>(sigma.size());
  const at::Tensor left = std::get<0>(at::linalg_qr(random_matrix({rows, k}, 2)));
  const at::Tensor right = std::get<0>(at::linalg_qr(random_matrix({cols, k}, 3)));
  const at::Tensor values = at::from_blob(const_cast<double*>(sigma.data()), {k}, at::kDouble);
  return (left * values).matmul(right.t());
}

std::vector<double> falling(int64_t n, double decades) {
  std::vector<double> sigma(n);
  for (int64_t i = 0; i < n; ++i) sigma[i] = std::pow(10, -decades * i / (n - 1));
  return sigma;
}

double mapped(double sigma, const CoefficientSet& set, int steps) {
  for (int step = 0; step < steps; ++step) {
    const auto& [a, b, c] = set.row(step);
    const double square = sigma * sigma;
    sigma *= a + b * square + c * square * square;
  }
  return sigma;
}

at::Tensor by_svd(const at::Tensor& x, const NewtonSchulz& options) {
  const at::Tensor wide = x.to(at::kDouble);
  auto [u, sigma, vh] = at::linalg_svd(wide / wide.norm(), /*full_matrices=*/false);
  double* values = sigma.mutable_data_ptr<double>();
  for (int64_t i = 0; i < sigma.numel(); ++i) {
    values[i] = mapped(values[i], options.coefficients, options.steps);
  }
  return (u * sigma).matmul(vh);
}

double distance(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor wide = want.to(at::kDouble);
  return ((got.to(at::kDouble) - wide).norm() / wide.norm()).item<double>();
}

std::vector<std::pair<std::string, at::Tensor>> matrix_zoo(int64_t rows, int64_t cols) {
  const int64_t n = std::min(rows, cols);
  std::vector<double> harmonic(n), spike(n, 1e-4);
  for (int64_t i = 0; i < n; ++i) harmonic[i] = 1.0 / (i + 1);
  spike[0] = 1;
  return {{"random", random_matrix({rows, cols})},
          {"harmonic", with_spectrum(harmonic, rows, cols)},
          {"condition 1e3", with_spectrum(falling(n, 3), rows, cols)},
          {"condition 1e6", with_spectrum(falling(n, 6), rows, cols)},
          {"rank 8", with_spectrum(std::vector<double>(8, 1.0), rows, cols)},
          {"one large", with_spectrum(spike, rows, cols)}};
}

}  // namespace dmuon

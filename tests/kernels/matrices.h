// Matrices with a known spectrum, and what Newton-Schulz makes of them by way of an SVD.
#pragma once
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "kernels/newton_schulz.h"

namespace dmuon {

// float64, uniform in [-1, 1], the same for the same seed.
at::Tensor random_matrix(std::vector<int64_t> sizes, uint64_t seed = 1);

// float64 [rows, cols] with these singular values, min(rows, cols) of them or fewer.
at::Tensor with_spectrum(const std::vector<double>& sigma, int64_t rows, int64_t cols);

// n values, from 1 down to 10^-decades, evenly in the logarithm.
std::vector<double> falling(int64_t n, double decades);

// The polynomial of `steps` rows applied to one singular value, in float64.
double mapped(double sigma, const CoefficientSet& set, int steps);

// U mapped(S) V^T of x / |x|_F, in float64: what an exact Newton-Schulz returns.
at::Tensor by_svd(const at::Tensor& x, const NewtonSchulz& options);

// |got - want|_F / |want|_F, in float64.
double distance(const at::Tensor& got, const at::Tensor& want);

// Spectra from kind to cruel, each [rows, cols] in float64.
std::vector<std::pair<std::string, at::Tensor>> matrix_zoo(int64_t rows, int64_t cols);

}  // namespace dmuon

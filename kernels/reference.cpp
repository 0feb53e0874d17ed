#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "kernels/checks.h"
#include "kernels/newton_schulz.h"

namespace dmuon {
namespace {

at::Tensor reference_of_one(const at::Tensor& matrix, const NewtonSchulz& options) {
  const bool tall = matrix.size(0) > matrix.size(1);
  const at::Tensor largest = matrix.abs().max();
  at::Tensor x = largest.item<double>() == 0 ? matrix.clone() : matrix / largest;
  if (largest.item<double>() != 0) x = x / x.norm();
  if (tall) x = x.t();
  for (int step = 0; step < options.steps; ++step) {
    const auto& [a, b, c] = options.coefficients.row(step);
    const at::Tensor gram = at::mm(x, x.t());
    x = a * x + at::mm(b * gram + c * at::mm(gram, gram), x);
  }
  return tall ? x.t() : x;
}

}  // namespace

at::Tensor newton_schulz_reference(const at::Tensor& x, const NewtonSchulz& options) {
  options.validate();
  require_matrices(x);
  const at::NoGradGuard no_grad;
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return out;
  if (x.dim() == 2) return out.copy_(reference_of_one(x, options));
  for (int64_t i = 0; i < x.size(0); ++i) out[i].copy_(reference_of_one(x[i], options));
  return out;
}

}  // namespace dmuon

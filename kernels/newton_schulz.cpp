#include "kernels/newton_schulz.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "kernels/checks.h"
#include "kernels/device_newton_schulz.h"
#include "kernels/error.h"
#include "kernels/iterate.h"
#include "kernels/normalise.h"

namespace dmuon {
namespace {

void run_direct(Iterate& iterate, const NewtonSchulz& options) {
  at::Tensor gram = iterate.square(iterate.dtype()), z = iterate.square(iterate.dtype());
  for (int step = 0; step < options.steps; ++step) {
    const auto& [a, b, c] = options.coefficients.row(step);
    iterate.gram(gram);
    multiply_add(z, b, gram, c, gram, gram);
    iterate.apply(a, z);
  }
}

void run_gram(Iterate& iterate, const NewtonSchulz& options) {
  const std::vector<int> bounds = chain_bounds(options);
  Chain chain(iterate.square(at::kFloat));
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    iterate.gram(chain.gram());
    chain.run(options.coefficients, bounds[i], bounds[i + 1]);
    iterate.apply(chain.product());
  }
}

// FLOPs in units of short^3, a bfloat16 product counting half; the chain is float32 in either case.
bool gram_is_cheaper(int64_t rows, int64_t cols, const NewtonSchulz& options) {
  const double aspect = static_cast<double>(std::max(rows, cols)) / std::min(rows, cols);
  const double weight = options.dtype == NsDtype::bfloat16 ? 0.5 : 1;
  const double steps = options.steps;
  const double chains = chain_bounds(options).size() - 1;
  const double direct = weight * steps * (4 * aspect + 2);
  const double gram = chains * (1 + weight) * 2 * aspect + 8 * steps - 6 * chains;
  return gram < direct;
}

NsAlgorithm algorithm_for(int64_t rows, int64_t cols, const NewtonSchulz& options) {
  const bool gram = options.algorithm == NsAlgorithm::gram && gram_is_cheaper(rows, cols, options);
  return gram ? NsAlgorithm::gram : NsAlgorithm::direct;
}

void require_restart_inside(int restart, int steps) {
  if (restart >= 1 && restart < steps) return;
  throw ConfigError(message("Newton-Schulz has a restart before step ", restart, " of ", steps,
                            "; restarts lie in [1, steps). Drop it, or take more steps."));
}

}  // namespace

void require_matrices(const at::Tensor& x) {
  if (x.dim() != 2 && x.dim() != 3) {
    throw ConfigError(message("Newton-Schulz got a tensor of ", x.dim(), " dims, sizes ", x.sizes(),
                              "; it takes [m, n] or [b, m, n]. Choose a view for this weight."));
  }
  if (!x.is_floating_point()) {
    throw ConfigError(message("Newton-Schulz got dtype ", x.scalar_type(),
                              "; it takes a floating-point tensor. Convert it first."));
  }
}

void NewtonSchulz::validate() const {
  if (steps < 1) {
    throw ConfigError(message("Newton-Schulz has steps = ", steps, "; at least 1 is needed."));
  }
  if (coefficients.rows.empty()) {
    throw ConfigError(message("The coefficient set '", coefficients.name,
                              "' has no rows; give at least one (a, b, c)."));
  }
  if (algorithm != NsAlgorithm::gram) return;
  for (int restart : restarts) require_restart_inside(restart, steps);
}

at::Tensor newton_schulz(const at::Tensor& x, const NewtonSchulz& options) {
  options.validate();
  require_matrices(x);
  const at::NoGradGuard no_grad;
  if (x.numel() == 0) return at::zeros(x.sizes(), x.options().dtype(at::kFloat));
  const at::Tensor there = newton_schulz_on_device(x, options);
  if (there.defined()) return there;
  const bool single = x.dim() == 2 || x.size(0) == 1;
  const bool bfloat16 = options.dtype == NsDtype::bfloat16;
  at::Tensor unit = normalised(single && x.dim() == 3 ? x.squeeze(0) : x);
  const GramSide shorter = x.size(-2) > x.size(-1) ? GramSide::cols : GramSide::rows;
  Iterate iterate(bfloat16 ? unit.to(at::kBFloat16) : std::move(unit), shorter);
  if (algorithm_for(x.size(-2), x.size(-1), options) == NsAlgorithm::gram) {
    run_gram(iterate, options);
  } else {
    run_direct(iterate, options);
  }
  return iterate.x().to(at::kFloat).view(x.sizes());
}

std::string newton_schulz_kernel(int64_t batch, int64_t rows, int64_t cols,
                                 const NewtonSchulz& options) {
  if (batch * rows * cols == 0) return "none";
  const bool gram = algorithm_for(rows, cols, options) == NsAlgorithm::gram;
  return message(gram ? "gram/" : "direct/", batch == 1 ? "mm/" : "bmm/",
                 options.dtype == NsDtype::bfloat16 ? "bfloat16" : "float32");
}

}  // namespace dmuon

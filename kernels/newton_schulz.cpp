#include "kernels/newton_schulz.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "kernels/checks.h"
#include "kernels/error.h"
#include "kernels/normalise.h"

namespace dmuon {
namespace {

void multiply(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (out.dim() == 2) {
    at::mm_out(out, a, b);
  } else {
    at::bmm_out(out, a, b);
  }
}

// out = beta c + alpha a b
void multiply_add(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                  const at::Tensor& a, const at::Tensor& b) {
  if (out.dim() == 2) {
    at::addmm_out(out, c, a, b, beta, alpha);
  } else {
    at::baddbmm_out(out, c, a, b, beta, alpha);
  }
}

// X with its short side as rows. A tall matrix stays as it lies in memory and is multiplied from
// the other side, so that nothing is transposed and the result is contiguous.
class Iterate {
 public:
  explicit Iterate(at::Tensor x)
      : x_(std::move(x)), spare_(at::empty_like(x_)), tall_(x_.size(-2) > x_.size(-1)) {}

  at::Tensor square(at::ScalarType dtype) const {
    std::vector<int64_t> sizes = x_.sizes().vec();
    sizes.end()[-1] = sizes.end()[-2] = std::min(sizes.end()[-1], sizes.end()[-2]);
    return at::empty(sizes, x_.options().dtype(dtype));
  }

  // out = X X^T, in the precision of out
  void gram(at::Tensor& out) const {
    const at::Tensor x = x_.to(out.scalar_type());
    if (tall_) {
      multiply(out, x.mT(), x);
    } else {
      multiply(out, x, x.mT());
    }
  }

  // X = Q X
  void apply(const at::Tensor& q) {
    const at::Tensor factor = q.to(x_.scalar_type());
    if (tall_) {
      multiply(spare_, x_, factor.mT());
    } else {
      multiply(spare_, factor, x_);
    }
    std::swap(x_, spare_);
  }

  // X = a X + Z X
  void apply(double a, const at::Tensor& z) {
    if (tall_) {
      multiply_add(spare_, a, x_, 1, x_, z.mT());
    } else {
      multiply_add(spare_, a, x_, 1, z, x_);
    }
    std::swap(x_, spare_);
  }

  at::ScalarType dtype() const { return x_.scalar_type(); }
  const at::Tensor& x() const { return x_; }

 private:
  at::Tensor x_, spare_;
  bool tall_;
};

void run_direct(Iterate& iterate, const NewtonSchulz& options) {
  at::Tensor gram = iterate.square(iterate.dtype()), z = iterate.square(iterate.dtype());
  for (int step = 0; step < options.steps; ++step) {
    const auto& [a, b, c] = options.coefficients.row(step);
    iterate.gram(gram);
    multiply_add(z, b, gram, c, gram, gram);
    iterate.apply(a, z);
  }
}

// The steps between two visits to X: Q is their product, R the Gram matrix of Q X.
class Chain {
 public:
  explicit Chain(const Iterate& iterate)
      : r_(iterate.square(at::kFloat)),
        z_(iterate.square(at::kFloat)),
        q_(iterate.square(at::kFloat)),
        spare_(iterate.square(at::kFloat)) {}

  void start(const Iterate& iterate) {
    iterate.gram(r_);
    fresh_ = true;
  }

  void step(const CoefficientRow& row, bool last) {
    const auto& [a, b, c] = row;
    multiply_add(z_, b, r_, c, r_, r_);
    if (!last) advance_gram(a);
    extend_product(a);
  }

  const at::Tensor& product() const { return q_; }

 private:
  // R = (a I + Z) R (a I + Z), never with a added to the diagonal of Z.
  void advance_gram(double a) {
    multiply_add(spare_, a, r_, 1, r_, z_);
    multiply_add(r_, a, spare_, 1, z_, spare_);
  }

  // Q = (a I + Z) Q, in this order: then R stays the Gram matrix of Q X under rounding, where Q (a
  // I + Z), equal in exact arithmetic, lets the two drift apart. A chain's first Q is a I + Z
  // itself.
  void extend_product(double a) {
    if (std::exchange(fresh_, false)) {
      std::swap(q_, z_);
      q_.diagonal(0, -2, -1).add_(a);
    } else {
      multiply_add(spare_, a, q_, 1, z_, q_);
      std::swap(q_, spare_);
    }
  }

  at::Tensor r_, z_, q_, spare_;
  bool fresh_ = true;
};

constexpr int kLongestChain = 5;

// The steps before which the Gram matrix is built: the first, the restarts, and where a chain would
// run on for too long.
std::set<int> chain_starts(const NewtonSchulz& options) {
  std::set<int> starts(options.restarts.begin(), options.restarts.end());
  starts.insert(0);
  for (int step = 0, start = 0; step < options.steps; ++step) {
    if (step - start == kLongestChain) starts.insert(step);
    if (starts.contains(step)) start = step;
  }
  return starts;
}

void run_gram(Iterate& iterate, const NewtonSchulz& options) {
  const std::set<int> starts = chain_starts(options);
  Chain chain(iterate);
  for (int step = 0; step < options.steps; ++step) {
    const bool last = step + 1 == options.steps || starts.contains(step + 1);
    if (starts.contains(step)) chain.start(iterate);
    chain.step(options.coefficients.row(step), last);
    if (last) iterate.apply(chain.product());
  }
}

// FLOPs in units of short^3, a bfloat16 product counting half; the chain is float32 in either case.
bool gram_is_cheaper(int64_t rows, int64_t cols, const NewtonSchulz& options) {
  const double aspect = static_cast<double>(std::max(rows, cols)) / std::min(rows, cols);
  const double weight = options.dtype == NsDtype::bfloat16 ? 0.5 : 1;
  const double steps = options.steps;
  const double chains = chain_starts(options).size();
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
  const bool single = x.dim() == 2 || x.size(0) == 1;
  const bool bfloat16 = options.dtype == NsDtype::bfloat16;
  at::Tensor unit = normalised(single && x.dim() == 3 ? x.squeeze(0) : x);
  Iterate iterate(bfloat16 ? unit.to(at::kBFloat16) : std::move(unit));
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

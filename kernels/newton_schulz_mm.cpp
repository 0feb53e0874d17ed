#include "kernels/newton_schulz_mm.h"

#include <algorithm>
#include <utility>

#include "kernels/error.h"
#include "kernels/flops.h"
#include "kernels/iterate.h"
#include "kernels/normalise.h"

namespace dmuon {
namespace {

std::vector<int> bounds_of(const NewtonSchulz& options) { return chain_bounds(options, {2}); }

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
  const std::vector<int> bounds = bounds_of(options);
  Chain chain(iterate.square(at::kFloat));
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    iterate.gram(chain.gram());
    chain.run(options.coefficients, bounds[i], bounds[i + 1]);
    iterate.apply(chain.product());
  }
}

// A bfloat16 product counts half; the chain, and the Gram matrix that it starts from, are float32.
bool gram_is_cheaper(int64_t rows, int64_t cols, const NewtonSchulz& options) {
  const auto s = static_cast<double>(std::min(rows, cols));
  const auto l = static_cast<double>(std::max(rows, cols));
  const double saved = options.dtype == NsDtype::bfloat16 ? 0.5 : 0;
  const auto chains = static_cast<double>(bounds_of(options).size()) - 1;
  const double direct = direct_flops(s, l, options.steps, Products::whole);
  const double applying = chains * 2 * s * s * l;
  const double gram = gram_flops(s, l, options.steps, chains, Products::whole);
  return gram - saved * applying < (1 - saved) * direct;
}

NsAlgorithm algorithm_for(int64_t rows, int64_t cols, const NewtonSchulz& options) {
  const bool gram = options.algorithm == NsAlgorithm::gram && gram_is_cheaper(rows, cols, options);
  return gram ? NsAlgorithm::gram : NsAlgorithm::direct;
}

}  // namespace

at::Tensor newton_schulz_mm(const at::Tensor& x, const NewtonSchulz& options) {
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

std::string newton_schulz_mm_name(int64_t batch, int64_t rows, int64_t cols,
                                  const NewtonSchulz& options) {
  const bool gram = algorithm_for(rows, cols, options) == NsAlgorithm::gram;
  return message(gram ? "gram/" : "direct/", batch == 1 ? "mm/" : "bmm/",
                 options.dtype == NsDtype::bfloat16 ? "bfloat16" : "float32");
}

}  // namespace dmuon

#include "kernels/cpu/recipe.h"

#include <algorithm>

#include "kernels/cpu/tile.h"
#include "kernels/error.h"
#include "kernels/flops.h"
#include "kernels/iterate.h"

namespace dmuon::cpu {
namespace {

// Without a restart the rounding of the first steps grows by the polynomial's slope at zero: 1e-3
// of the result where singular values spread, up to 1e-2 in small matrices.
std::vector<int> open_restarts(int64_t order, int64_t length, bool bfloat16) {
  const bool once = bfloat16 || restarts_once(order, length);
  return once ? std::vector{2} : std::vector<int>{};
}

}  // namespace

double true_flops(const Recipe& recipe, int64_t rows, int64_t cols) {
  const auto s = static_cast<double>(std::min(rows, cols));
  const auto l = static_cast<double>(std::max(rows, cols));
  if (recipe.form == NsAlgorithm::direct)
    return direct_flops(s, l, recipe.steps, Products::triangles);
  const auto chains = static_cast<double>(recipe.bounds.size()) - 1;
  return gram_flops(s, l, recipe.steps, chains, Products::triangles);
}

Recipe recipe_for(int64_t rows, int64_t cols, const NewtonSchulz& options) {
  Recipe recipe{.isa = active_isa(), .steps = options.steps, .coefficients = options.coefficients};
  recipe.bfloat16 =
      options.dtype == NsDtype::bfloat16 && tile_kernels(recipe.isa).multiply_pairs[0] != nullptr;
  const int64_t order = std::min(rows, cols);
  const int64_t length = std::max(rows, cols);
  recipe.bounds = chain_bounds(options, open_restarts(order, length, recipe.bfloat16));
  if (options.algorithm == NsAlgorithm::direct) return recipe;
  Recipe gram = recipe;
  gram.form = NsAlgorithm::gram;
  const double cost = gram_handicap(order) * true_flops(gram, rows, cols);
  return cost < true_flops(recipe, rows, cols) ? gram : recipe;
}

std::string recipe_name(const Recipe& recipe) {
  return message(recipe.form == NsAlgorithm::gram ? "gram/" : "direct/", isa_name(recipe.isa),
                 recipe.bfloat16 ? "/bfloat16" : "/float32");
}

}  // namespace dmuon::cpu

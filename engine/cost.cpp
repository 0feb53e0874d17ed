// The cost of a matrix: operations (kernels/flops.h), and what comes on top of them.
//
// Our kernels compute triangles and, from s = 128 and a = 2.5 on, restart after five steps only: 3a
// + 17 for k = 5, and 6a + 14 below. torch's products (symmetric_products = false) are whole ones,
// with a restart before step 2 counted from 0: 8a + 28. Where the direct form costs less, near
// squares, the Gram kernel runs it (kernels/newton_schulz.h).
//
// Small products run at a lower rate, and there is work per element: packing, the norm, the result.
// Both constants are fitted to `make bench-ns`, which prints what is left of the difference.
#include <algorithm>

#include "engine/plan.h"
#include "kernels/flops.h"

namespace dmuon {
namespace {

double chains_of(double s, double l, int steps, Products products) {
  if (products == Products::triangles && !restarts_once(s, l)) {
    return (steps + kLongestChain - 1) / kLongestChain;
  }
  return steps > 2 ? 2 : 1;
}

// A product of order s takes the time of one whose order is larger by this.
constexpr double kOrderOffset = 40;
// Operations in the time of one element's packing, norm and result.
constexpr double kPerElement = 60;

// A whole number, as `flops` is s^2 times one: sums of costs are exact in any order.
double with_overheads(double flops, double s, double l) {
  return s == 0 ? 0 : flops / s * (s + kOrderOffset) + kPerElement * s * l;
}

// AdamW has no products: it is bound by memory. In fp32 it reads weight, gradient and two moments
// and writes three of them, 28 bytes per element; a core does about 10 operations in the time of
// one byte (the intensity from which its products stop being bound by memory).
constexpr double kAdamwPerElement = 28 * 10;

double short_dim(const Matrix& m) { return static_cast<double>(std::min(m.rows, m.cols)); }
double long_dim(const Matrix& m) { return static_cast<double>(std::max(m.rows, m.cols)); }

double flops_of_one(const Matrix& matrix, const PlanPolicy& policy) {
  const double s = short_dim(matrix), l = long_dim(matrix);
  const Products products = policy.symmetric_products ? Products::triangles : Products::whole;
  const double direct = direct_flops(s, l, policy.ns_steps, products);
  const double chains = chains_of(s, l, policy.ns_steps, products);
  const double gram = gram_flops(s, l, policy.ns_steps, chains, products);
  const double handicap = policy.symmetric_products ? gram_handicap(s) : 1;
  const bool cheaper = gram * handicap < direct;
  return cheaper && !policy.direct ? gram : direct;
}

}  // namespace

double newton_schulz_flops(const Matrix& matrix, const PlanPolicy& policy) {
  return static_cast<double>(matrix.batch) * flops_of_one(matrix, policy);
}

double newton_schulz_cost(const Matrix& matrix, const PlanPolicy& policy) {
  const double batch = static_cast<double>(matrix.batch);
  const double s = short_dim(matrix), l = long_dim(matrix);
  if (matrix.route == Route::adamw) return kAdamwPerElement * batch * s * l;
  return batch * with_overheads(flops_of_one(matrix, policy), s, l);
}

}  // namespace dmuon

// Where the formulas come from, in multiples of s^3 with a = l / s, one multiply-add being two
// operations. A product of s x l with l x s costs 2a, of s x s with s x s 2, and of s x s with s x
// l 2a; a symmetric one costs half where one triangle is computed. We counted products per step:
//
//   direct  X X^T, A A and B X in each of k steps: k (4a + 2); symmetric: k (3a + 1).
//   gram    X X^T once and Q X once: 4a (3a). Of s x s products the first step needs one (R R),
//           each later step four (Q Z, R Z, Z R Z, R R): k steps need 4k - 3, each 2 (1).
//           A restart applies Q to X and rebuilds the Gram matrix: 4a (3a) more, and it saves the
//           three products that would carry Q and R over: -6 (-3).
//
// Our kernels compute triangles and, from s = 128 on, restart after five steps only: 3a + 17 for k
// = 5, and 6a + 14 below. torch's products (symmetric_products = false) are whole ones, with a
// restart before step 2 counted from 0: 8a + 28. Where the direct form costs less, near squares,
// the Gram kernel runs it (kernels/newton_schulz.h).
//
// Small products run at a lower rate, and there is work per element: packing, the norm, the result.
// Both constants are fitted to `make bench-ns`, which prints what is left of the difference.
#include <algorithm>

#include "engine/plan.h"

namespace dmuon {
namespace {

double direct_flops(double s, double l, double steps, bool symmetric) {
  return steps * (symmetric ? 3 * s * s * l + s * s * s : 4 * s * s * l + 2 * s * s * s);
}

int chains_of(double s, int steps, bool symmetric) {
  if (symmetric && s >= 128) return (steps + 4) / 5;
  return steps > 2 ? 2 : 1;
}

double gram_flops(double s, double l, int steps, bool symmetric) {
  const double chains = chains_of(s, steps, symmetric);
  const double wide = chains * (symmetric ? 3 : 4);
  const double square = (4 * steps - 3 * chains) * (symmetric ? 1 : 2);
  return wide * s * s * l + square * s * s * s;
}

// As in kernels/cpu/recipe.cpp: gram runs where direct takes more than this of its operations.
double gram_handicap(double s, bool symmetric) { return !symmetric ? 1 : s < 128 ? 1.5 : 1.1; }

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
  const bool symmetric = policy.symmetric_products;
  const double direct = direct_flops(s, l, policy.ns_steps, symmetric);
  const double gram = gram_flops(s, l, policy.ns_steps, symmetric);
  const bool cheaper = gram * gram_handicap(s, symmetric) < direct;
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

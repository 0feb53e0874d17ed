// Where the formulas come from, in multiples of s^3 with a = l / s, one multiply-add being two
// operations. A product of s x l with l x s costs 2a, of s x s with s x s 2, and of s x s with s x
// l 2a; a symmetric one costs half where one triangle is computed. We counted products per step:
//
//   direct  X X^T, A A and B X in each of k steps: k (4a + 2); symmetric: k (3a + 1).
//   gram    X X^T once and Q X once: 4a (3a). Of s x s products the first step needs one (R R),
//   each
//           later step four (Q Z, R Z, Z R Z, R R): k steps need 4k - 3 of them, each 2 (1).
//           A restart applies Q to X and rebuilds the Gram matrix: 4a (3a) more, and it saves the
//           three products that would carry Q and R over: -6 (-3).
//
// With a restart and k = 5, gram costs 8a + 28 and, symmetric, 6a + 14. Our kernels restart before
// step 2 (counted from 0), so k <= 2 has none. Where the direct form costs less, near squares, the
// Gram kernel runs it (kernels/newton_schulz.h).
#include <algorithm>

#include "engine/plan.h"

namespace dmuon {
namespace {

double direct_cost(double s, double l, double steps, bool symmetric) {
  return steps * (symmetric ? 3 * s * s * l + s * s * s : 4 * s * s * l + 2 * s * s * s);
}

double gram_cost(double s, double l, double steps, bool symmetric) {
  const double restarts = steps > 2 ? 1 : 0;
  const double wide = (1 + restarts) * (symmetric ? 3 : 4);
  const double square = (4 * steps - 3 - 3 * restarts) * (symmetric ? 1 : 2);
  return wide * s * s * l + square * s * s * s;
}

// AdamW has no products: it is bound by memory. In fp32 it reads weight, gradient and two moments
// and writes three of them, 28 bytes per element; a core does about 10 operations in the time of
// one byte (the intensity from which its products stop being bound by memory).
constexpr double kAdamwPerElement = 28 * 10;

}  // namespace

double newton_schulz_cost(const Matrix& matrix, const PlanPolicy& policy) {
  const double batch = static_cast<double>(matrix.batch);
  const double s = static_cast<double>(std::min(matrix.rows, matrix.cols));
  const double l = static_cast<double>(std::max(matrix.rows, matrix.cols));
  if (matrix.route == Route::adamw) return kAdamwPerElement * batch * s * l;
  const double direct = direct_cost(s, l, policy.ns_steps, policy.symmetric_products);
  if (policy.direct) return batch * direct;
  return batch * std::min(direct, gram_cost(s, l, policy.ns_steps, policy.symmetric_products));
}

}  // namespace dmuon

// What Newton-Schulz costs and when the Gram form is the cheaper one, for the kernels that run and
// for the plan that balances them. In operations, a multiply-add being two.
//
// In multiples of s^3 with a = l / s: a product of s x l with l x s costs 2a, of s x s with s x s
// 2, of s x s with s x l 2a; a symmetric one, of which one triangle is computed, half. By step:
//
//   direct  X X^T, A A and B X in each of k steps: k (4a + 2); in triangles k (3a + 1).
//   gram    X X^T once and Q X once: 4a; in triangles 3a. Of s x s products the first step needs
//   one
//           (R R), each later step four (Q Z, R Z, Z R Z, R R): k steps need 4k - 3, each 2; in
//           triangles 1. A restart applies Q to X and rebuilds the Gram matrix: 4a (3a) more, and
//           it saves the three products that would carry Q and R over: -6 (-3).
#pragma once

namespace dmuon {

// `whole`: torch's; `triangles`: ours.
enum class Products { whole, triangles };

inline double direct_flops(double s, double l, double steps, Products products) {
  return steps * (products == Products::triangles ? s * s * (3 * l + s) : s * s * (4 * l + 2 * s));
}

// `chains`: one more than there are restarts.
inline double gram_flops(double s, double l, double steps, double chains, Products products) {
  const bool triangles = products == Products::triangles;
  const double wide = chains * (triangles ? 3 : 4) * l;
  return s * s * (wide + (4 * steps - 3 * chains) * (triangles ? 1 : 2) * s);
}

// Below, there is little time to win from the Gram form, and more error to lose.
inline bool is_small(double s) { return s < 128; }

// Whether our float32 kernels restart a Gram chain once unless told otherwise. From aspect 2.5 on
// random matrices err about as in torch's direct iteration without it; nearer the square they have
// small singular values, and err up to seven times as much (bench.py --only ns_accuracy).
inline bool restarts_once(double s, double l) { return is_small(s) || l < 2.5 * s; }

// By how much direct's operations must exceed gram's for gram to run, in our kernels: its products
// are smaller, which costs a tenth in time per operation, and it is the less exact.
inline double gram_handicap(double s) { return is_small(s) ? 1.5 : 1.25; }

// Steps after which the Gram matrix is rebuilt unasked: rounding grows with every step of a chain.
constexpr int kLongestChain = 5;

}  // namespace dmuon

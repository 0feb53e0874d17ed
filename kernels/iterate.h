// The parts of a Newton-Schulz iteration: the matrix X, and a chain of steps on its Gram matrix.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/newton_schulz.h"

namespace dmuon {

// Which dim of X as it lies in memory the Gram matrix is taken of: rows: X X^T, Q X; cols: X^T X,
// X Q^T. The polynomial is the same; the other dim is summed over.
enum class GramSide { rows, cols };

// X, [m, n] or [b, m, n] and contiguous. Nothing is transposed: a matrix whose side is its columns
// is multiplied from the right.
class Iterate {
 public:
  Iterate(at::Tensor x, GramSide side);

  // The length of that side.
  int64_t order() const { return x_.size(side_ == GramSide::rows ? -2 : -1); }

  // Uninitialised: what gram takes and apply reads.
  at::Tensor square(at::ScalarType dtype) const;

  // out = X X^T, in the precision of out
  void gram(at::Tensor& out) const;

  // X = Q X, in the precision of X
  void apply(const at::Tensor& q);

  // X = a X + Z X
  void apply(double a, const at::Tensor& z);

  at::ScalarType dtype() const { return x_.scalar_type(); }
  const at::Tensor& x() const { return x_; }

 private:
  at::Tensor x_, spare_;
  GramSide side_;
};

// The steps between two visits to X: Q is their product, R the Gram matrix of Q X as it grows.
class Chain {
 public:
  // `gram` is float32, symmetric and square, in its last two dims; the chain works in it and in
  // three more of its size.
  explicit Chain(at::Tensor gram);

  // Steps [begin, end) from the R that gram() holds; Q is then in product(), and R is spent.
  void run(const CoefficientSet& coefficients, int begin, int end);

  at::Tensor& gram() { return r_; }
  at::Tensor& product() { return q_; }

 private:
  void step(const CoefficientRow& row, bool first, bool last);
  void advance_gram(double a);
  void start_product(double a);
  void extend_product(double a);

  at::Tensor r_, z_, q_, spare_;
};

// The steps before which the Gram matrix is built, in order, and last the number of steps: chain i
// takes steps [bounds[i], bounds[i + 1]). They are 0, the restarts, and where a chain would run on
// for too long. `open`: the restarts where the options leave them open.
std::vector<int> chain_bounds(const NewtonSchulz& options, const std::vector<int>& open);

// out = beta c + alpha a b
void multiply_add(at::Tensor& out, double beta, const at::Tensor& c, double alpha,
                  const at::Tensor& a, const at::Tensor& b);

}  // namespace dmuon

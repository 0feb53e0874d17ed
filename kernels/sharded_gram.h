// Newton-Schulz of a matrix that lies in shards on several ranks, without moving it: the ranks send
// Gram matrices to one owner, and the owner sends back what each multiplies its shard by.
//
// A matrix [m, n] or a batch [b, m, n] is cut along one of its last two dims into one shard per
// rank, of any lengths, empty ones included. `order` is the length of the other dim, which all
// shards share. The Gram matrix over the cut, X^T X = sum X_i^T X_i where rows are cut, X X^T where
// columns are, is order x order. Its polynomial is Newton-Schulz whichever dim is longer.
//
// Who calls what, sharded_gram_rounds(options) times:
//   1. every rank: GramShard::gram(payload), and the payload travels to the owner;
//   2. the owner:  GramOwner::round(payloads, factor), and the factor travels to every rank;
//   3. every rank: GramShard::apply(factor).
// GramShard::result() is then this rank's piece of the orthogonalised matrix. The owner is as a
// rule one of the ranks and does all three. Nothing here communicates or waits for the device.
//
// Bytes. Payload and factor have the same size, sharded_gram_elements. A rank other than the owner
// sends 4 (order (order + 1) / 2 + 1) bytes per round and matrix and receives as many. Gathering
// the whole to the owner and scattering the result moves 4 order cut / ranks bytes each way, `cut`
// being the length of the dim that is cut. So this moves less where a shard is longer than
// rounds (order + 1) / 2: with the default two rounds where cut > ranks (order + 1), with one round
// from half of that, and never where the short dim is cut. The owner's links carry ranks - 1 times
// as much in either form. What it costs is latency: 2 rounds messages in a row instead of 2.
//
// Work. Each rank does 4 rounds order^2 cut / ranks operations for its own shard, and the owner is
// left with the chain, (8 steps - 6 rounds) order^3.
//
// Accuracy. That of newton_schulz's Gram form over the same dim: at most twice the error that this
// makes over the orders of its sum, 1.8 times the worst measured. What travels back is the triangle
// of (Q + Q^T) / 2: Q is symmetric but for rounding, and its mean errs as little as Q itself (0.99
// times, the median of 918 cases), where one of its triangles errs up to 580 times as much. Where
// the short dim is cut, the Gram matrix has a null space, in which rounding grows by the slope that
// the polynomial has at zero: 1.4e-4 is the worst measured with the default options. Near a square,
// newton_schulz itself takes the direct form, which without restarts is the more accurate one.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/iterate.h"
#include "kernels/newton_schulz.h"
#include "kernels/triangle.h"

namespace dmuon {

struct Scaled;  // kernels/exponent.h

enum class CutDim { rows, cols };

// One more than the restarts, that after five steps included. Restarts left open are one, before
// the third step: where the short dim is cut, the Gram matrix has a null space (see Accuracy).
// options.algorithm is not looked at here or below: this is always the Gram form.
int sharded_gram_rounds(const NewtonSchulz& options);

// float32 elements of one payload and of one factor: per matrix a triangle and an exponent. A rank
// with an empty shard sends as much as any.
constexpr int64_t sharded_gram_elements(int64_t batch, int64_t order) {
  return batch * (triangle_elements(order) + 1);
}

// True where a rank moves fewer bytes than by gather and scatter in float32. `cut` is the length of
// the cut dim of the whole matrix, which `ranks` ranks share evenly.
constexpr bool sharded_gram_saves_bytes(int64_t order, int64_t cut, int ranks, int rounds) {
  return ranks * rounds * sharded_gram_elements(1, order) < order * cut;
}

// One rank's shard. Its scale is its own: a power of two brings max|x| to [1/2, 1) and travels as
// the exponent, so that squares neither over- nor underflow, whatever the other ranks hold.
//
// dtype bfloat16 means what it means in newton_schulz: X and the products with it are bfloat16,
// Gram matrices and factors float32. Workspace beside the shard in that dtype: a second one, and
// one order x order float32 matrix; none for an empty shard.
class GramShard {
 public:
  // shard: [m_i, n] or [b, m_i, n], or [m, n_i] or [b, m, n_i]; floating point, any strides, not
  // modified. ConfigError for other dims or dtypes.
  GramShard(const at::Tensor& shard, CutDim cut, const NewtonSchulz& options);

  // Overwrites payload: float32, 1-D, contiguous, of sharded_gram_elements, on the shard's device.
  void gram(at::Tensor payload);

  // factor: as GramOwner::round wrote it.
  void apply(const at::Tensor& factor);

  // float32, contiguous, of the shard's sizes. NaN throughout where any rank's shard of this matrix
  // held a NaN or an infinity; zero where all were, or where this shard is below 2^-126 of the
  // largest.
  at::Tensor result() const;

 private:
  int64_t order() const { return iterate_.order(); }
  GramShard(at::IntArrayRef sizes, const Scaled& scaled, CutDim cut);

  std::vector<int64_t> sizes_;
  at::Tensor exponent_;  // [1, 1] or [b, 1, 1]; 0 once the factor has taken the scale out
  Iterate iterate_;
  at::Tensor square_;  // Gram matrix, then factor; undefined for an empty shard
};

// The owner's side of one step of one batch. Workspace: four order x order float32 matrices per
// matrix of the batch; the payloads are summed in a fifth, half as large.
class GramOwner {
 public:
  GramOwner(int64_t batch, int64_t order, const NewtonSchulz& options,
            at::Device device = at::kCPU);

  // payloads: one per rank, summed in this order: the same order gives the same bits. Overwrites
  // factor, which has a payload's size. ConfigError for another size and for a round too many.
  void round(const std::vector<at::Tensor>& payloads, at::Tensor factor);

 private:
  void require_another_round() const;

  int64_t batch_, order_;
  CoefficientSet coefficients_;
  std::vector<int> bounds_;
  size_t round_ = 0;
  Chain chain_;
};

}  // namespace dmuon

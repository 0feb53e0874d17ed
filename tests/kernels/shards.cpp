#include "tests/kernels/shards.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

namespace dmuon {
namespace {

at::Tensor empty_message(int64_t batch, int64_t order) {
  return at::empty({sharded_gram_elements(batch, order)}, at::kFloat);
}

}  // namespace

int64_t cut_dim(CutDim cut) { return cut == CutDim::rows ? -2 : -1; }

CutDim longer(const at::Tensor& x) { return x.size(-2) > x.size(-1) ? CutDim::rows : CutDim::cols; }

CutDim shorter(const at::Tensor& x) {
  return longer(x) == CutDim::rows ? CutDim::cols : CutDim::rows;
}

std::vector<at::Tensor> orthogonalised(const std::vector<at::Tensor>& pieces, CutDim cut,
                                       const NewtonSchulz& options) {
  const int64_t batch = pieces[0].dim() == 3 ? pieces[0].size(0) : 1;
  const int64_t order = pieces[0].size(cut == CutDim::rows ? -1 : -2);
  std::vector<GramShard> ranks;
  for (const at::Tensor& piece : pieces) ranks.emplace_back(piece, cut, options);
  GramOwner owner(batch, order, options);
  std::vector<at::Tensor> payloads;
  for (size_t i = 0; i < pieces.size(); ++i) payloads.push_back(empty_message(batch, order));
  at::Tensor factor = empty_message(batch, order);
  for (int round = 0; round < sharded_gram_rounds(options); ++round) {
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i].gram(payloads[i]);
    owner.round(payloads, factor);
    for (GramShard& rank : ranks) rank.apply(factor);
  }
  std::vector<at::Tensor> results;
  for (const GramShard& rank : ranks) results.push_back(rank.result());
  return results;
}

at::Tensor sharded(const at::Tensor& x, CutDim cut, const Lengths& lengths,
                   const NewtonSchulz& options) {
  const int64_t dim = cut_dim(cut);
  return at::cat(orthogonalised(x.split_with_sizes(lengths, dim), cut, options), dim);
}

Lengths uneven(const at::Tensor& x, CutDim cut, int64_t ranks) {
  const int64_t length = x.size(cut_dim(cut));
  Lengths lengths(ranks, 0);
  int64_t rest = length;
  for (int64_t i = 1; i < ranks; ++i) {
    if (i != 1 || ranks == 2) lengths[i] = length / (ranks + i);
    rest -= lengths[i];
  }
  lengths[0] = rest;
  return lengths;
}

}  // namespace dmuon

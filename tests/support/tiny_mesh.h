// A (replicate, shard, tp) grid over the ranks of a SimWorld, and what tensor parallelism makes of
// a linear layer.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "engine/layout.h"
#include "engine/plan.h"
#include "tests/support/sim_transport.h"

namespace dmuon::testing {

// One rank's place. Rank = (replicate * shards + shard) * tps + tp, as in the plan.
class TinyGrid {
 public:
  // mesh.shard 0: all ranks that the other axes leave.
  TinyGrid(const Mesh& mesh, int ranks, int rank);

  const Mesh& mesh() const { return mesh_; }
  const Position& position() const { return position_; }
  int cell() const { return rank_ / static_cast<int>(mesh_.tp); }

  // The ranks that differ from this one on that axis only.
  std::vector<int> shards() const;
  std::vector<int> replicas() const;
  std::vector<int> tps() const;

 private:
  std::vector<int> along(int64_t size, int64_t stride, int64_t mine) const;

  Mesh mesh_;
  int rank_;
  Position position_;
};

// By the name of the matrix; one that is not here is whole on every TP rank.
using Cuts = std::map<std::string, TpLayout>;

// `lengths` of consecutive pieces, one per TP rank.
TpLayout cut_in_pieces(std::vector<int64_t> sizes, int dim, const std::vector<int64_t>& lengths);
// Each of the consecutive `blocks` of the dim is cut for itself, as a fused weight is.
TpLayout cut_in_blocks(std::vector<int64_t> sizes, int dim, const std::vector<int64_t>& blocks,
                       int tps);
// The first ranks hold the most, the last ones perhaps nothing.
TpLayout cut_evenly(std::vector<int64_t> sizes, int dim, int tps);

at::Tensor indices_on(const TpLayout& layout, int tp);
at::Tensor shard_of(const at::Tensor& whole, const TpLayout& layout, int tp);

// h weight^T, where this rank holds a shard of the weight and the whole of h; the result and both
// gradients are as on one rank. Collective over `tp`, in the backward pass too.
at::Tensor tp_linear(const at::Tensor& h, const at::Tensor& weight, const TpLayout& layout,
                     Transport& tp);

}  // namespace dmuon::testing

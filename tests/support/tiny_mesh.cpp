#include "tests/support/tiny_mesh.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>

namespace dmuon::testing {
namespace {

at::Tensor summed(const at::Tensor& part, Transport& tp) {
  at::NoGradGuard no_grad;
  const at::Tensor sum = part.detach().contiguous().clone();
  tp.all_reduce(sum, ReduceOp::sum, "(model)");
  return sum;
}

// Used by all TP ranks, each for its own part of the result: the parts of its gradient add up.
at::Tensor shared_input(const at::Tensor& h, Transport& tp) {
  if (!h.requires_grad()) return h;
  const at::Tensor used = h.view_as(h);
  used.register_hook([&tp](const at::Tensor& gradient) { return summed(gradient, tp); });
  return used;
}

// Exactly the sum; the gradient of each part is the gradient of the sum.
at::Tensor add_up(const at::Tensor& part, Transport& tp) {
  return summed(part, tp) + (part - part.detach());
}

}  // namespace

TinyGrid::TinyGrid(const Mesh& mesh, int ranks, int rank) : mesh_(mesh), rank_(rank) {
  if (mesh_.shard == 0) mesh_.shard = ranks / (mesh_.replicate * mesh_.tp);
  position_.tp = static_cast<int>(rank % mesh_.tp);
  position_.shard = static_cast<int>(cell() % mesh_.shard);
  position_.replicate = static_cast<int>(cell() / mesh_.shard);
}

std::vector<int> TinyGrid::along(int64_t size, int64_t stride, int64_t mine) const {
  std::vector<int> ranks;
  for (int64_t i = 0; i < size; ++i) ranks.push_back(static_cast<int>(rank_ + (i - mine) * stride));
  return ranks;
}

std::vector<int> TinyGrid::shards() const { return along(mesh_.shard, mesh_.tp, position_.shard); }
std::vector<int> TinyGrid::replicas() const {
  return along(mesh_.replicate, mesh_.tp * mesh_.shard, position_.replicate);
}
std::vector<int> TinyGrid::tps() const { return along(mesh_.tp, 1, position_.tp); }

TpLayout cut_in_pieces(std::vector<int64_t> sizes, int dim, const std::vector<int64_t>& lengths) {
  TpLayout layout{.dim = dim, .sizes = std::move(sizes)};
  int64_t start = 0;
  for (const int64_t length : lengths) {
    layout.ranges.push_back({{start, length}});
    start += length;
  }
  return layout;
}

TpLayout cut_evenly(std::vector<int64_t> sizes, int dim, int tps) {
  const int64_t whole = sizes[dim], most = (whole + tps - 1) / tps;
  std::vector<int64_t> lengths;
  for (int64_t r = 0; r < tps; ++r) {
    lengths.push_back(std::clamp<int64_t>(whole - r * most, 0, most));
  }
  return cut_in_pieces(std::move(sizes), dim, lengths);
}

TpLayout cut_in_blocks(std::vector<int64_t> sizes, int dim, const std::vector<int64_t>& blocks,
                       int tps) {
  TpLayout layout{.dim = dim, .sizes = sizes};
  layout.ranges.resize(tps);
  int64_t before = 0;
  for (const int64_t block : blocks) {
    sizes[dim] = block;
    const TpLayout cut = cut_evenly(sizes, dim, tps);
    for (int r = 0; r < tps; ++r) {
      const auto [start, length] = cut.ranges[r].front();
      if (length > 0) layout.ranges[r].push_back({before + start, length});
    }
    before += block;
  }
  return layout;
}

at::Tensor indices_on(const TpLayout& layout, int tp) {
  std::vector<at::Tensor> parts{at::zeros({0}, at::kLong)};
  for (const auto& [start, length] : layout.ranges[tp]) {
    parts.push_back(at::arange(start, start + length, at::kLong));
  }
  return at::cat(parts);
}

at::Tensor shard_of(const at::Tensor& whole, const TpLayout& layout, int tp) {
  return layout.cut() ? whole.index_select(layout.dim, indices_on(layout, tp)) : whole;
}

at::Tensor tp_linear(const at::Tensor& h, const at::Tensor& weight, const TpLayout& layout,
                     Transport& tp) {
  if (!layout.cut()) return h.matmul(weight.t());
  const at::Tensor indices = indices_on(layout, tp.rank());
  const at::Tensor input = shared_input(h, tp);
  if (layout.dim == 1) return add_up(input.index_select(1, indices).matmul(weight.t()), tp);
  const at::Tensor mine = input.matmul(weight.t());
  return add_up(at::zeros({h.size(0), layout.sizes[0]}, mine.options()).index_add(1, indices, mine),
                tp);
}

}  // namespace dmuon::testing

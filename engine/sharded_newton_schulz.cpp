#include "engine/sharded_newton_schulz.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "engine/transport_checks.h"

namespace dmuon {
namespace {

// The dim that all shards share, and the length of the one that is cut.
int64_t order_of(const Matrix& matrix, CutDim cut) {
  return cut == CutDim::rows ? matrix.cols : matrix.rows;
}
int64_t cut_of(const Matrix& matrix, CutDim cut) {
  return cut == CutDim::rows ? matrix.rows : matrix.cols;
}

bool flag_of(const at::Tensor& message) {
  return message.narrow(0, message.size(0) - 1, 1).item<float>() != 0;
}

void set_flag(const at::Tensor& message) { message.narrow(0, message.size(0) - 1, 1).fill_(1); }

at::Tensor without_flag(const at::Tensor& message) {
  return message.narrow(0, 0, message.size(0) - 1);
}

}  // namespace

std::optional<CutDim> cut_dim(const Matrix& matrix, const TpLayout& layout) {
  if (!layout.cut()) return std::nullopt;
  const auto dims = static_cast<int>(layout.sizes.size());
  // Rows are dim 0, and what follows is columns.
  if (matrix.batch == 1 && matrix.rows == layout.sizes.front()) {
    return layout.dim == 0 ? CutDim::rows : CutDim::cols;
  }
  if (layout.dim == dims - 2) return CutDim::rows;
  if (layout.dim == dims - 1) return CutDim::cols;
  return std::nullopt;
}

bool stays_in_shards(const Matrix& matrix, const TpLayout& layout, int ranks,
                     const NewtonSchulz& options, ShardedGram policy) {
  const auto cut = cut_dim(matrix, layout);
  if (!cut || policy == ShardedGram::never || matrix.route != Route::muon) return false;
  if (policy == ShardedGram::always) return true;
  return sharded_gram_saves_bytes(order_of(matrix, *cut), cut_of(matrix, *cut), ranks,
                                  sharded_gram_rounds(options));
}

TpBytes tp_bytes(const Matrix& matrix, const TpLayout& layout, int tp_owner, int ranks,
                 const NewtonSchulz& options) {
  const auto cut = cut_dim(matrix, layout);
  if (!cut) return {};
  const int64_t away = matrix.numel() - layout.numel_on(tp_owner);
  const int64_t message = sharded_gram_elements(matrix.batch, order_of(matrix, *cut));
  return {.whole = 2 * away * int64_t{sizeof(float)},
          .in_shards =
              2 * (ranks - 1) * sharded_gram_rounds(options) * message * int64_t{sizeof(float)}};
}

ShardedNewtonSchulz::ShardedNewtonSchulz(const OwnershipPlan& plan, const UnitStore& unit,
                                         const NewtonSchulz& options, Transport& tp)
    : plan_(plan), unit_(unit), options_(options), tp_(tp) {}

void ShardedNewtonSchulz::add(int index, const at::Tensor& shard) {
  const Slot& slot = unit_.slots()[index];
  const Matrix& matrix = plan_.matrices[slot.matrix];
  const CutDim cut = *cut_dim(matrix, slot.layout);
  const int64_t order = order_of(matrix, cut);
  Member member{.slot = index, .owner = slot.tp_owner};
  member.elements = sharded_gram_elements(matrix.batch, order) + 1;
  if (shard.defined()) {
    const int64_t held = order == 0 ? 0 : slot.numel / std::max<int64_t>(1, matrix.batch * order);
    const bool rows = cut == CutDim::rows;
    member.shard.emplace(
        shard.reshape({matrix.batch, rows ? held : matrix.rows, rows ? matrix.cols : held}), cut,
        options_);
  }
  if (slot.leads) {
    member.led.emplace(matrix.batch, order, options_, slot.inner.device());
  }
  members_.push_back(std::move(member));
}

std::vector<int64_t> ShardedNewtonSchulz::to_owners() const {
  std::vector<int64_t> counts(tp_.size(), 0);
  for (const auto& member : members_) {
    if (!member.led) counts[member.owner] += member.elements;
  }
  return counts;
}

int64_t ShardedNewtonSchulz::led_elements() const {
  int64_t led = 0;
  for (const auto& member : members_) led += member.led ? member.elements : 0;
  return led;
}

std::vector<int64_t> ShardedNewtonSchulz::from_members() const {
  std::vector<int64_t> counts(tp_.size(), led_elements());
  counts[tp_.rank()] = 0;
  return counts;
}

at::Tensor ShardedNewtonSchulz::empty_message(int64_t numel) const {
  return at::empty({numel}, unit_.float_options());
}

void ShardedNewtonSchulz::exchange(const std::vector<int64_t>& send_counts,
                                   const std::vector<int64_t>& recv_counts) {
  received_ = empty_message(sum(recv_counts));
  pending_ = tp_.start_exchange(received_, recv_counts, sent_, send_counts, unit_.name());
}

void ShardedNewtonSchulz::wait() {
  if (const auto pending = std::exchange(pending_, nullptr)) pending->wait();
}

// To the owners in rank order, each owner's members in the order of the slots.
void ShardedNewtonSchulz::send_grams() {
  const std::vector<int64_t> counts = to_owners();
  sent_ = empty_message(sum(counts));
  int64_t at = 0;
  for (int owner = 0; owner < tp_.size(); ++owner) {
    for (auto& member : members_) {
      if (member.owner != owner) continue;
      member.mine =
          member.led ? empty_message(member.elements) : sent_.narrow(0, at, member.elements);
      at += member.led ? 0 : member.elements;
      write_gram(member);
    }
  }
  exchange(counts, from_members());
}

void ShardedNewtonSchulz::write_gram(Member& member) const {
  member.mine.zero_();
  if (!member.shard) return;
  member.shard->gram(without_flag(member.mine));
  set_flag(member.mine);
}

// Every rank gets the same.
void ShardedNewtonSchulz::send_factors() {
  wait();
  const at::Tensor grams = received_;
  const int64_t others = tp_.size() - 1;
  sent_ = empty_message(others * led_elements());
  const at::Tensor factors = sent_.view({others, led_elements()});
  int64_t at = 0;
  for (auto& member : members_) {
    if (!member.led) continue;
    member.mine = factor_of(member, payloads_of(member, grams, at));
    factors.narrow(1, at, member.elements).copy_(member.mine);
    at += member.elements;
  }
  exchange(from_members(), to_owners());
}

// Of the ranks that have a shard, in rank order. `offset`: in each rank's message.
std::vector<at::Tensor> ShardedNewtonSchulz::payloads_of(const Member& member,
                                                         const at::Tensor& grams,
                                                         int64_t offset) const {
  std::vector<at::Tensor> payloads;
  for (int r = 0; r < tp_.size(); ++r) {
    const int64_t before = r < tp_.rank() ? r : r - 1;
    const at::Tensor message =
        r == tp_.rank() ? member.mine
                        : grams.narrow(0, before * led_elements() + offset, member.elements);
    if (flag_of(message)) payloads.push_back(without_flag(message));
  }
  return payloads;
}

at::Tensor ShardedNewtonSchulz::factor_of(Member& member,
                                          const std::vector<at::Tensor>& payloads) const {
  const at::Tensor factor = empty_message(member.elements).zero_();
  if (payloads.empty()) return factor;
  member.led->round(payloads, without_flag(factor));
  set_flag(factor);
  return factor;
}

void ShardedNewtonSchulz::apply_factors() {
  wait();
  int64_t at = 0;
  for (int r = 0; r < tp_.size(); ++r) {
    for (auto& member : members_) {
      if (member.owner != r) continue;
      if (!member.led) {
        member.mine = received_.narrow(0, at, member.elements);
        at += member.elements;
      }
      if (member.shard && flag_of(member.mine)) member.shard->apply(without_flag(member.mine));
    }
  }
}

std::vector<ShardedNewtonSchulz::Result> ShardedNewtonSchulz::results() const {
  std::vector<Result> results;
  for (const auto& member : members_) {
    const auto& sizes = unit_.slots()[member.slot].sizes;
    results.push_back({.slot = member.slot,
                       .piece = member.shard ? member.shard->result().view(sizes) : at::Tensor(),
                       .led = member.led && flag_of(member.mine)});
  }
  return results;
}

}  // namespace dmuon

#include "engine/tp_exchange.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "engine/transport_checks.h"
#include "kernels/pack.h"

namespace dmuon {
namespace {

std::vector<int> slots_with(const UnitStore& unit, bool Slot::*takes_part) {
  std::vector<int> chosen;
  for (int s = 0; s < static_cast<int>(unit.slots().size()); ++s) {
    const Slot& slot = unit.slots()[s];
    if (slot.*takes_part && slot.parameter.defined() && slot.parameter.requires_grad())
      chosen.push_back(s);
  }
  return chosen;
}

bool present(const at::Tensor& buffer, int64_t flag) {
  return buffer.is_cpu() ? buffer.data_ptr<float>()[flag] != 0 : buffer[flag].item<float>() != 0;
}

void pack_piece(const at::Tensor& buffer, int64_t offset, int64_t numel, const at::Tensor& piece) {
  pack_one(buffer, offset, numel, piece);
  pack_flags(buffer, offset + numel, &piece, 1);
}

// Calls f(range in the whole, range in the piece) for what TP rank `tp` holds of a cut matrix.
template <class F>
void for_each_range(const Slot& slot, const at::Tensor& whole, const at::Tensor& piece, int tp,
                    const F& f) {
  int64_t at = 0;
  for (const auto& range : slot.layout.ranges[tp]) {
    f(whole.narrow(slot.layout.dim, range.start, range.length),
      piece.narrow(slot.layout.dim, at, range.length));
    at += range.length;
  }
}

void put(const Slot& slot, const at::Tensor& whole, const at::Tensor& flat, int tp) {
  for_each_range(slot, whole, flat.view(slot.layout.sizes_on(tp)), tp,
                 [](at::Tensor in_whole, const at::Tensor& in_piece) { in_whole.copy_(in_piece); });
}

// Undefined gives undefined.
at::Tensor piece_of(const Slot& slot, const at::Tensor& whole, int tp) {
  if (!whole.defined() || !slot.layout.cut()) return whole;
  if (slot.layout.ranges[tp].size() == 1) {
    const auto& range = slot.layout.ranges[tp].front();
    return whole.narrow(slot.layout.dim, range.start, range.length);
  }
  const at::Tensor piece = at::empty(slot.layout.sizes_on(tp), whole.options());
  for_each_range(slot, whole, piece, tp,
                 [](const at::Tensor& in_whole, at::Tensor in_piece) { in_piece.copy_(in_whole); });
  return piece;
}

int64_t elements(const UnitStore& unit, std::vector<int> slots, int tp, int tp_size) {
  const Pieces pieces(unit, std::move(slots), tp, tp_size);
  return sum(pieces.mine()) + sum(pieces.of_others());
}

// The first piece makes the whole, of zeros where there are no others.
void add_piece(at::Tensor& whole, const Slot& slot, const at::Tensor& flat, int tp) {
  if (!whole.defined()) {
    whole = at::empty(slot.layout.sizes, flat.options().dtype(at::kFloat)).zero_();
  }
  put(slot, whole, flat, tp);
}

// `mine`: this rank's own pieces; `received`: the others'.
std::vector<at::Tensor> put_together(const Pieces& pieces, const std::vector<at::Tensor>& mine,
                                     const at::Tensor& received, int tp) {
  std::vector<at::Tensor> wholes(mine.size());
  for (size_t i = 0; i < mine.size(); ++i) {
    if (!pieces.slot(i).leads || !mine[i].defined()) continue;
    add_piece(wholes[i], pieces.slot(i), mine[i].reshape({-1}), tp);
  }
  pieces.for_each_of_others([&](size_t i, int other, int64_t offset) {
    const int64_t numel = pieces.numel(i, other);
    if (!present(received, offset + numel)) return;
    add_piece(wholes[i], pieces.slot(i), received.narrow(0, offset, numel), other);
  });
  return wholes;
}

}  // namespace

at::Tensor Staging::take(int64_t numel, const at::TensorOptions& options) {
  if (!shared_) return at::empty({numel}, options);
  if (!buffer_.defined() || buffer_.numel() < numel) buffer_ = at::empty({numel}, options);
  return buffer_.narrow(0, 0, numel);
}

std::vector<int> gathering_slots(const UnitStore& unit) { return slots_with(unit, &Slot::gathers); }

std::vector<int> scattering_slots(const UnitStore& unit) {
  return slots_with(unit, &Slot::scatters);
}

std::vector<int> slots_in_shards(const UnitStore& unit) {
  return slots_with(unit, &Slot::in_shards);
}

Pieces::Pieces(const UnitStore& unit, std::vector<int> slots, int tp, int tp_size)
    : unit_(unit), slots_(std::move(slots)), tp_(tp), tp_size_(tp_size) {}

const Slot& Pieces::slot(size_t i) const { return unit_.slots()[slots_[i]]; }

int64_t Pieces::numel(size_t i, int tp) const {
  return slot(i).layout.cut() ? slot(i).layout.numel_on(tp) : slot(i).numel;
}

template <class F>
void Pieces::for_each_of_mine(const F& f) const {
  int64_t offset = 0;
  for (int leader = 0; leader < tp_size_; ++leader) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slot(i).tp_owner != leader || leader == tp_) continue;
      f(i, offset);
      offset += numel(i, tp_) + 1;
    }
  }
}

template <class F>
void Pieces::for_each_of_others(const F& f) const {
  int64_t offset = 0;
  for (int other = 0; other < tp_size_; ++other) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slot(i).leads || other == tp_) continue;
      f(i, other, offset);
      offset += numel(i, other) + 1;
    }
  }
}

std::vector<int64_t> Pieces::mine() const {
  std::vector<int64_t> counts(tp_size_, 0);
  for_each_of_mine([&](size_t i, int64_t) { counts[slot(i).tp_owner] += numel(i, tp_) + 1; });
  return counts;
}

std::vector<int64_t> Pieces::of_others() const {
  std::vector<int64_t> counts(tp_size_, 0);
  for_each_of_others([&](size_t i, int other, int64_t) { counts[other] += numel(i, other) + 1; });
  return counts;
}

int64_t gather_elements(const UnitStore& unit, int tp, int tp_size) {
  return elements(unit, gathering_slots(unit), tp, tp_size);
}

int64_t scatter_elements(const UnitStore& unit, int tp, int tp_size) {
  return elements(unit, scattering_slots(unit), tp, tp_size);
}

std::vector<at::Tensor> gather_gradients(const UnitStore& unit,
                                         const std::vector<at::Tensor>& gradients, Transport& tp,
                                         Staging& staging) {
  const Pieces pieces(unit, gathering_slots(unit), tp.rank(), tp.size());
  if (pieces.slots().empty()) return {};
  const std::vector<int64_t> sends = pieces.mine(), receives = pieces.of_others();
  const at::Tensor buffer = staging.take(sum(sends) + sum(receives), unit.float_options());
  const at::Tensor sent = buffer.narrow(0, 0, sum(sends));
  const at::Tensor received = buffer.narrow(0, sum(sends), sum(receives));
  pieces.for_each_of_mine([&](size_t i, int64_t offset) {
    pack_piece(sent, offset, pieces.slot(i).numel, gradients[i]);
  });
  tp.exchange(received, receives, sent, sends, unit.name());
  return put_together(pieces, gradients, received, tp.rank());
}

UpdateScatter::UpdateScatter(const UnitStore& unit, const std::vector<at::Tensor>& updates,
                             Transport& tp, Staging& staging)
    : pieces_(unit, scattering_slots(unit), tp.rank(), tp.size()), results_(updates.size()) {
  const std::vector<int64_t> sends = pieces_.of_others(), receives = pieces_.mine();
  const at::Tensor buffer = staging.take(sum(sends) + sum(receives), unit.float_options());
  sent_ = buffer.narrow(0, 0, sum(sends));
  received_ = buffer.narrow(0, sum(sends), sum(receives));
  pieces_.for_each_of_others([&](size_t i, int other, int64_t offset) {
    pack_piece(sent_, offset, pieces_.numel(i, other),
               piece_of(pieces_.slot(i), updates[i], other));
  });
  for (size_t i = 0; i < results_.size(); ++i) {
    if (!pieces_.slot(i).leads || !updates[i].defined()) continue;
    results_[i] = piece_of(pieces_.slot(i), updates[i], tp.rank()).contiguous();
  }
  pending_ = tp.start_exchange(received_, receives, sent_, sends, unit.name());
}

std::vector<at::Tensor> UpdateScatter::finish() {
  pending_->wait();
  pieces_.for_each_of_mine([&](size_t i, int64_t offset) {
    const Slot& slot = pieces_.slot(i);
    if (!present(received_, offset + slot.numel)) return;
    results_[i] = received_.narrow(0, offset, slot.numel).view(slot.sizes);
  });
  return std::move(results_);
}

}  // namespace dmuon

#include "engine/tp_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

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

int64_t numel_on(const Slot& slot, int tp) {
  return slot.layout.cut() ? slot.layout.numel_on(tp) : slot.numel;
}

// A piece travels with one element behind it: 1 where there is one.
int64_t travelling(const Slot& slot, int tp) { return numel_on(slot, tp) + 1; }

bool present(const at::Tensor& buffer, int64_t flag) {
  return buffer.is_cpu() ? buffer.data_ptr<float>()[flag] != 0 : buffer[flag].item<float>() != 0;
}

void pack_piece(const at::Tensor& buffer, int64_t offset, int64_t numel, const at::Tensor& piece) {
  pack_one(buffer, offset, numel, piece);
  pack_flags(buffer, offset + numel, &piece, 1);
}

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
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

struct Counts {
  std::vector<int64_t> send, receive;  // per TP rank
};

Counts gather_counts(const UnitStore& unit, const std::vector<int>& slots, int tp, int size) {
  Counts counts{std::vector<int64_t>(size), std::vector<int64_t>(size)};
  for (const int s : slots) {
    const Slot& slot = unit.slots()[s];
    if (slot.tp_owner != tp) counts.send[slot.tp_owner] += travelling(slot, tp);
    for (int r = 0; slot.leads && r < size; ++r) {
      if (r != tp) counts.receive[r] += travelling(slot, r);
    }
  }
  return counts;
}

// The way back.
Counts scatter_counts(const UnitStore& unit, const std::vector<int>& slots, int tp, int size) {
  Counts counts = gather_counts(unit, slots, tp, size);
  std::swap(counts.send, counts.receive);
  return counts;
}

at::TensorOptions float_options(const UnitStore& unit) {
  return unit.slots().front().inner.options().dtype(at::kFloat).requires_grad(false);
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

int64_t gather_elements(const UnitStore& unit, int tp, int tp_size) {
  const Counts counts = gather_counts(unit, gathering_slots(unit), tp, tp_size);
  return total(counts.send) + total(counts.receive);
}

int64_t scatter_elements(const UnitStore& unit, int tp, int tp_size) {
  const Counts counts = scatter_counts(unit, scattering_slots(unit), tp, tp_size);
  return total(counts.send) + total(counts.receive);
}

std::vector<at::Tensor> gather_gradients(const UnitStore& unit,
                                         const std::vector<at::Tensor>& pieces, Transport& tp,
                                         Staging& staging) {
  const int me = tp.rank(), size = tp.size();
  const std::vector<int> slots = gathering_slots(unit);
  std::vector<at::Tensor> wholes(slots.size());
  if (slots.empty()) return wholes;
  const Counts counts = gather_counts(unit, slots, me, size);
  const int64_t sent = total(counts.send);
  const at::Tensor buffer = staging.take(sent + total(counts.receive), float_options(unit));
  const at::Tensor send = buffer.narrow(0, 0, sent);
  const at::Tensor received = buffer.narrow(0, sent, total(counts.receive));
  int64_t at = 0;
  for (int r = 0; r < size; ++r) {
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = unit.slots()[slots[i]];
      if (slot.tp_owner != r || r == me) continue;
      pack_piece(send, at, slot.numel, pieces[i]);
      at += travelling(slot, me);
    }
  }
  tp.exchange(received, counts.receive, send, counts.send, unit.name());

  // The first present piece makes the whole, of zeros where others have none.
  const auto add = [&](size_t i, const at::Tensor& flat, int from) {
    const Slot& slot = unit.slots()[slots[i]];
    if (!wholes[i].defined()) {
      wholes[i] = at::empty(slot.layout.sizes, float_options(unit)).zero_();
    }
    put(slot, wholes[i], flat, from);
  };
  at = 0;
  for (int r = 0; r < size; ++r) {
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = unit.slots()[slots[i]];
      if (!slot.leads) continue;
      if (r == me) {
        if (pieces[i].defined()) add(i, pieces[i].reshape({-1}), r);
        continue;
      }
      const int64_t numel = numel_on(slot, r);
      if (present(received, at + numel)) add(i, received.narrow(0, at, numel), r);
      at += travelling(slot, r);
    }
  }
  return wholes;
}

UpdateScatter::UpdateScatter(const UnitStore& unit, const std::vector<at::Tensor>& updates,
                             Transport& tp, Staging& staging)
    : unit_(unit), slots_(scattering_slots(unit)), rank_(tp.rank()), size_(tp.size()) {
  const Counts counts = scatter_counts(unit, slots_, rank_, size_);
  const int64_t sent = total(counts.send);
  const at::Tensor buffer = staging.take(sent + total(counts.receive), float_options(unit));
  sent_ = buffer.narrow(0, 0, sent);
  received_ = buffer.narrow(0, sent, total(counts.receive));
  int64_t at = 0;
  for (int r = 0; r < size_; ++r) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Slot& slot = unit_.slots()[slots_[i]];
      if (!slot.leads || r == rank_) continue;
      pack_piece(sent_, at, numel_on(slot, r), piece_of(slot, updates[i], r));
      at += travelling(slot, r);
    }
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = unit_.slots()[slots_[i]];
    const at::Tensor own = slot.leads ? piece_of(slot, updates[i], rank_) : at::Tensor();
    mine_.push_back(own.defined() ? own.contiguous() : own);
  }
  pending_ = tp.start_exchange(received_, counts.receive, sent_, counts.send, unit_.name());
}

std::vector<at::Tensor> UpdateScatter::finish() {
  pending_->wait();
  int64_t at = 0;
  for (int r = 0; r < size_; ++r) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Slot& slot = unit_.slots()[slots_[i]];
      if (slot.tp_owner != r || r == rank_) continue;
      if (present(received_, at + slot.numel)) {
        mine_[i] = received_.narrow(0, at, slot.numel).view(slot.sizes);
      }
      at += travelling(slot, rank_);
    }
  }
  return std::move(mine_);
}

}  // namespace dmuon

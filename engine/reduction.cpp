#include "engine/reduction.h"

#include <ATen/ops/empty.h>

#include "kernels/pack.h"
#include "kernels/sum_pieces.h"

namespace dmuon {
namespace {

// A segment travels as its gradients, then one element per matrix: 1 where the sender had one.
int64_t travelling(const SegmentStore& segment) { return segment.numel + segment.slots; }

bool any_sender(const at::Tensor& sum, int64_t flag) {
  return sum.is_cpu() ? sum.data_ptr<float>()[flag] != 0 : sum[flag].item<float>() != 0;
}

}  // namespace

Reduction::Reduction(const UnitStore& unit, std::vector<at::Tensor> gradients, at::ScalarType dtype,
                     double divisor)
    : unit_(unit),
      gradients_(std::move(gradients)),
      options_(unit.slots().front().parameter.options().dtype(dtype).requires_grad(false)),
      divisor_(divisor),
      transfers_(transfers_of(unit)) {}

std::vector<Reduction::Transfer> Reduction::transfers_of(const UnitStore& unit) {
  std::vector<Transfer> transfers;
  int32_t last_owner = -1;
  for (int i = 0; i < static_cast<int>(unit.segments().size()); ++i) {
    const auto& segment = unit.segments()[i];
    if (transfers.empty() || segment.owner <= last_owner) transfers.emplace_back();
    if (segment.owned) transfers.back().mine = i;
    transfers.back().segments.push_back(i);
    last_owner = segment.owner;
  }
  return transfers;
}

void Reduction::start(Transport& transport) {
  rank_ = transport.rank();
  size_ = transport.size();
  for (auto& transfer : transfers_) start(transfer, transport);
  gradients_.clear();
}

void Reduction::start(Transfer& transfer, Transport& transport) {
  std::vector<int64_t> send_counts(size_, 0), recv_counts(size_, 0);
  int64_t sent = 0;
  for (const int i : transfer.segments) {
    if (i == transfer.mine) continue;
    const auto& segment = unit_.segments()[i];
    sent += send_counts[segment.owner] = travelling(segment);
  }
  const int64_t own = transfer.mine < 0 ? 0 : travelling(unit_.segments()[transfer.mine]);
  recv_counts.assign(size_, own);
  recv_counts[rank_] = 0;

  transfer.packed = at::empty({sent + own}, options_);
  transfer.received = at::empty({own * (size_ - 1)}, options_);
  nbytes_ += own * size_ * transfer.packed.element_size();
  int64_t offset = 0;
  for (const int i : transfer.segments) {
    const auto& segment = unit_.segments()[i];
    pack(segment, transfer.packed, i == transfer.mine ? sent : offset);
    offset += i == transfer.mine ? 0 : travelling(segment);
  }
  const at::Tensor send = own ? transfer.packed.narrow(0, 0, sent) : transfer.packed;
  transfer.pending =
      transport.start_exchange(transfer.received, recv_counts, send, send_counts, unit_.name());
}

void Reduction::pack(const SegmentStore& segment, const at::Tensor& packed, int64_t offset) const {
  const at::Tensor* gradients = gradients_.data() + segment.first_slot;
  for (int i = 0; i < segment.slots; ++i) {
    const Slot& slot = unit_.slots()[segment.first_slot + i];
    pack_one(packed, offset + slot.offset, slot.numel, gradients[i]);
  }
  pack_flags(packed, offset + segment.numel, gradients, segment.slots);
}

void Reduction::finish() {
  for (auto& transfer : transfers_) {
    transfer.pending->wait();
    if (transfer.mine >= 0) sum(transfer);
    transfer.pending.reset();
    transfer.packed = transfer.received = at::Tensor();
  }
}

// The flags are divided too: what counts is whether their sum is zero.
void Reduction::sum(Transfer& transfer) const {
  const int64_t own = travelling(unit_.segments()[transfer.mine]);
  const int64_t sent = transfer.packed.size(0) - own;
  std::vector<at::Tensor> pieces;
  pieces.reserve(size_);
  for (int r = 0; r < size_; ++r) {
    const int64_t before = r < rank_ ? r : r - 1;
    pieces.push_back(r == rank_ ? transfer.packed.narrow(0, sent, own)
                                : transfer.received.narrow(0, before * own, own));
  }
  transfer.sum = at::empty({own}, options_.dtype(at::kFloat));
  sum_pieces(transfer.sum, pieces, 1.0 / divisor_, false);
}

at::Tensor Reduction::result(int index) const {
  const Slot& slot = unit_.slots()[index];
  if (!slot.owned) return {};
  for (const auto& transfer : transfers_) {
    if (transfer.mine != slot.segment) continue;
    const auto& segment = unit_.segments()[slot.segment];
    if (!any_sender(transfer.sum, segment.numel + index - segment.first_slot)) return {};
    return transfer.sum.as_strided(slot.sizes, slot.strides, slot.offset);
  }
  return {};
}

}  // namespace dmuon

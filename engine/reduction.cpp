#include "engine/reduction.h"

#include <ATen/ops/empty.h>

#include <numeric>

#include "kernels/sum_pieces.h"

namespace dmuon {
namespace {

// A segment travels as its gradients, then one element per matrix: 1 where the sender had one.
int64_t travelling(const SegmentStore& segment) { return segment.numel + segment.slots; }

// Segments that move together: at most one per owner.
std::vector<std::vector<int>> transfers_of(const UnitStore& unit) {
  std::vector<std::vector<int>> transfers;
  int32_t last_owner = -1;
  for (size_t i = 0; i < unit.segments().size(); ++i) {
    const int32_t owner = unit.segments()[i].owner;
    if (transfers.empty() || owner <= last_owner) transfers.emplace_back();
    transfers.back().push_back(static_cast<int>(i));
    last_owner = owner;
  }
  return transfers;
}

}  // namespace

Reduction::Reduction(const UnitStore& unit, std::vector<at::Tensor> gradients, at::ScalarType dtype,
                     double divisor)
    : unit_(unit),
      gradients_(std::move(gradients)),
      dtype_(dtype),
      divisor_(divisor),
      device_(unit.slots().front().parameter.device()),
      results_(gradients_.size()) {}

void Reduction::run(Transport& transport) {
  for (const auto& segments : transfers_of(unit_)) run_transfer(transport, segments);
  gradients_.clear();
}

// The buffer to send holds what goes to the others, in rank order, then what stays here.
void Reduction::run_transfer(Transport& transport, const std::vector<int>& segments) {
  const int rank = transport.rank();
  std::vector<int64_t> send_counts(transport.size(), 0), recv_counts(transport.size(), 0);
  int mine = -1;
  for (const int i : segments) {
    const auto& segment = unit_.segments()[i];
    if (segment.owner == rank)
      mine = i;
    else
      send_counts[segment.owner] = travelling(segment);
  }
  const int64_t own = mine < 0 ? 0 : travelling(unit_.segments()[mine]);
  if (mine >= 0) std::fill(recv_counts.begin(), recv_counts.end(), own);
  recv_counts[rank] = 0;

  const auto options = at::TensorOptions().dtype(dtype_).device(device_);
  const int64_t sent = std::accumulate(send_counts.begin(), send_counts.end(), int64_t{0});
  const at::Tensor packed = at::empty({sent + own}, options);
  int64_t offset = 0;
  for (const int i : segments) {
    if (i == mine) continue;
    pack(unit_.segments()[i], packed.narrow(0, offset, travelling(unit_.segments()[i])));
    offset += travelling(unit_.segments()[i]);
  }
  if (mine >= 0) pack(unit_.segments()[mine], packed.narrow(0, sent, own));

  const at::Tensor received = at::empty({own * (transport.size() - 1)}, options);
  transport.exchange(received, recv_counts, packed.narrow(0, 0, sent), send_counts, unit_.name());
  if (mine < 0) return;
  std::vector<at::Tensor> pieces;
  for (int r = 0; r < transport.size(); ++r) {
    const int64_t before = r < rank ? r : r - 1;
    pieces.push_back(r == rank ? packed.narrow(0, sent, own)
                               : received.narrow(0, before * own, own));
  }
  sum(mine, pieces);
}

void Reduction::pack(const SegmentStore& segment, at::Tensor out) const {
  for (int i = 0; i < segment.slots; ++i) {
    const Slot& slot = unit_.slots()[segment.first_slot + i];
    const at::Tensor& gradient = gradients_[segment.first_slot + i];
    at::Tensor place = out.narrow(0, slot.offset, c10::multiply_integers(slot.sizes));
    if (gradient.defined())
      place.view(slot.sizes).copy_(gradient);
    else
      place.zero_();
    out.narrow(0, segment.numel + i, 1).fill_(gradient.defined() ? 1 : 0);
  }
}

void Reduction::sum(int index, const std::vector<at::Tensor>& pieces) {
  const auto& segment = unit_.segments()[index];
  const at::Tensor total =
      at::empty({travelling(segment)}, at::TensorOptions().dtype(at::kFloat).device(device_));
  at::Tensor gradient = total.narrow(0, 0, segment.numel);
  at::Tensor senders = total.narrow(0, segment.numel, segment.slots);
  std::vector<at::Tensor> gradients, flags;
  for (const auto& piece : pieces) {
    gradients.push_back(piece.narrow(0, 0, segment.numel));
    flags.push_back(piece.narrow(0, segment.numel, segment.slots));
  }
  sum_pieces(gradient, gradients, 1.0 / divisor_, false);
  sum_pieces(senders, flags, 1.0, false);
  for (int i = 0; i < segment.slots; ++i) {
    const Slot& slot = unit_.slots()[segment.first_slot + i];
    const int64_t numel = c10::multiply_integers(slot.sizes);
    results_[segment.first_slot + i] = {gradient.narrow(0, slot.offset, numel).view(slot.sizes),
                                        senders.narrow(0, i, 1)};
  }
}

at::Tensor Reduction::result(int slot) const {
  const auto& [gradient, senders] = results_[slot];
  return senders.defined() && senders.item<float>() > 0 ? gradient : at::Tensor();
}

}  // namespace dmuon

#include "engine/reduction.h"

#include <utility>

#include "kernels/pack.h"

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
      options_(unit.float_options().dtype(dtype)),
      divisor_(divisor) {}

void Reduction::start(Transport& shard) {
  std::vector<int64_t> counts(shard.size(), 0);
  for (const auto& segment : unit_.segments()) counts[segment.holder] += travelling(segment);
  within_ = std::make_unique<SummingExchange>(shard, counts, options_, unit_.name(),
                                              [&](int r, const at::Tensor& packed, int64_t offset) {
                                                for (const auto& segment : unit_.segments()) {
                                                  if (segment.holder != r) continue;
                                                  pack(segment, packed, offset);
                                                  offset += travelling(segment);
                                                }
                                              });
  gradients_.clear();
}

void Reduction::pack(const SegmentStore& segment, const at::Tensor& packed, int64_t offset) const {
  const at::Tensor* gradients = gradients_.data() + segment.first_slot;
  for (int i = 0; i < segment.slots; ++i) {
    const Slot& slot = unit_.slots()[segment.first_slot + i];
    pack_one(packed, offset + slot.offset, slot.numel, gradients[i]);
  }
  pack_flags(packed, offset + segment.numel, gradients, segment.slots);
}

// The flags are scaled too: what counts is whether their sum is zero.
void Reduction::finish(Transport* replicate) {
  if (!replicate) {
    sum_ = within_->finish(1.0 / divisor_);
  } else {
    sum_ = over_replicas(within_->finish(1.0), *replicate);
  }
}

at::Tensor Reduction::over_replicas(const at::Tensor& sums, Transport& replicate) const {
  std::vector<int64_t> counts(replicate.size(), 0);
  for (const auto& segment : unit_.segments()) {
    if (segment.held) counts[segment.replica] += travelling(segment);
  }
  SummingExchange across(replicate, counts, options_, unit_.name(),
                         [&](int r, const at::Tensor& packed, int64_t offset) {
                           int64_t from = 0;
                           for (const auto& segment : unit_.segments()) {
                             if (!segment.held) continue;
                             const int64_t numel = travelling(segment);
                             if (segment.replica == r) {
                               pack_one(packed, offset, numel, sums.narrow(0, from, numel));
                               offset += numel;
                             }
                             from += numel;
                           }
                         });
  return across.finish(1.0 / divisor_);
}

at::Tensor Reduction::result(int index) const {
  const Slot& slot = unit_.slots()[index];
  if (!slot.owned) return {};
  int64_t before = 0;
  for (int i = 0; i < slot.segment; ++i) {
    if (unit_.segments()[i].owned) before += travelling(unit_.segments()[i]);
  }
  const auto& segment = unit_.segments()[slot.segment];
  if (!any_sender(sum_, before + segment.numel + index - segment.first_slot)) return {};
  // A version counter of its own: views share one, and writing one gradient changes no other.
  return sum_.as_strided(slot.sizes, slot.strides, before + slot.offset).variable_data();
}

}  // namespace dmuon

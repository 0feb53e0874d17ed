#include "engine/unit_store.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "engine/error.h"

namespace dmuon {
namespace {

at::ScalarType master_dtype(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

UnitStore::UnitStore(const OwnershipPlan& plan, int unit, int rank) : name_(plan.units[unit].name) {
  for (const auto& segment : plan.units[unit].segments) {
    SegmentStore store{.owner = segment.owner, .first_slot = static_cast<int32_t>(slots_.size())};
    for (const int32_t matrix : segment.matrices) {
      Slot slot{.matrix = matrix, .segment = static_cast<int32_t>(segments_.size())};
      slot.offset = store.numel;
      slot.owned = segment.owner == rank;
      store.numel += plan.matrices[matrix].numel();
      slots_.push_back(std::move(slot));
    }
    store.slots = static_cast<int32_t>(segment.matrices.size());
    segments_.push_back(std::move(store));
  }
}

void UnitStore::adopt(int index, const at::Tensor& parameter) {
  Slot& slot = slots_[index];
  slot.parameter = parameter;
  slot.sizes = parameter.sizes().vec();
  if (parameter.is_meta()) return;
  auto& segment = segments_[slot.segment];
  if (slot.owned) {
    if (!segment.master.defined()) {
      segment.master = at::empty(
          {segment.numel}, parameter.options().dtype(master_dtype(parameter)).requires_grad(false));
    }
    part_of_master(slot).copy_(parameter.detach());
  }
  slot.placeholder = make_placeholder(parameter);
  show(parameter, slot.placeholder);
}

bool UnitStore::adopted() const {
  return std::all_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.placeholder.defined(); });
}

at::Tensor UnitStore::part_of_master(const Slot& slot) const {
  const int64_t numel = c10::multiply_integers(slot.sizes);
  return segments_[slot.segment].master.narrow(0, slot.offset, numel).view(slot.sizes);
}

at::Tensor UnitStore::master(int index) const {
  const Slot& slot = slots_[index];
  return slot.owned && slot.placeholder.defined() ? part_of_master(slot) : at::Tensor();
}

void UnitStore::set_value(int index, const at::Tensor& value) {
  const Slot& slot = slots_[index];
  if (!slot.owned) return;
  part_of_master(slot).copy_(value);
  if (prepared_ && publishes()) slot.whole.variable_data().copy_(value);
}

void UnitStore::prepare(at::ScalarType compute_dtype) {
  if (prepared_) return;
  const at::Device device = slots_.front().parameter.device();
  for (auto& segment : segments_) {
    segment.buffer = FlatBuffer(segment.numel, compute_dtype, device);
    segment.buffer.allocate();  // views can be made of allocated memory only
    for (int i = 0; i < segment.slots; ++i) {
      Slot& slot = slots_[segment.first_slot + i];
      slot.whole = segment.buffer.view(slot.offset, slot.sizes);
    }
    if (!segment.master.defined()) {
      segment.buffer.free();
      continue;
    }
    segment.buffer.flat().copy_(segment.master);
    if (segment.master.scalar_type() == compute_dtype) segment.master = segment.buffer.flat();
  }
  prepared_ = true;
}

std::vector<Broadcast> UnitStore::allocate() {
  std::vector<Broadcast> parts;
  parts.reserve(segments_.size());
  for (auto& segment : segments_) {
    segment.buffer.allocate();
    if (segment.numel > 0) parts.push_back({segment.buffer.flat(), segment.owner});
  }
  return parts;
}

void UnitStore::show_whole() {
  for (auto& slot : slots_) show(slot.parameter, slot.whole);
  shown_ = true;
}

void UnitStore::release() {
  if (!shown_) return;
  for (auto& slot : slots_) show(slot.parameter, slot.placeholder);
  for (auto& segment : segments_) {
    if (!segment.master.defined()) segment.buffer.free();
  }
  shown_ = false;
}

bool UnitStore::publishes() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const SegmentStore& segment) {
    return segment.master.defined() &&
           segment.master.scalar_type() != segment.buffer.flat().scalar_type();
  });
}

void UnitStore::publish() {
  for (auto& segment : segments_) {
    if (segment.master.defined() && !segment.master.is_same(segment.buffer.flat())) {
      segment.buffer.flat().copy_(segment.master);
    }
  }
}

void UnitStore::verify(const OwnershipPlan& plan) const {
  for (const auto& slot : slots_) {
    const at::Tensor& expected = shown_ ? slot.whole : slot.placeholder;
    if (shows(slot.parameter, expected)) continue;
    throw ConfigError(
        message("parameter '", plan.matrices[slot.matrix].name,
                "' was changed behind dmuon's back: its data "
                "was replaced (`.data = ...`, `.to(...)`, `.bfloat16()`) after dedicate_params. "
                "Cast or move "
                "the model before dedicate_params; to set its value use load_state_dict."));
  }
}

}  // namespace dmuon

#include "engine/unit_store.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "engine/error.h"

namespace dmuon {
namespace {

at::ScalarType master_dtype(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
    strides[d] = strides[d + 1] * std::max<int64_t>(1, sizes[d + 1]);
  }
  return strides;
}

}  // namespace

UnitStore::UnitStore(const OwnershipPlan& plan, int unit, int rank) : name_(plan.units[unit].name) {
  for (const auto& segment : plan.units[unit].segments) {
    SegmentStore store{.owner = segment.owner, .first_slot = static_cast<int32_t>(slots_.size())};
    store.owned = segment.owner == rank;
    for (const int32_t matrix : segment.matrices) {
      Slot slot{.matrix = matrix, .segment = static_cast<int32_t>(segments_.size())};
      slot.offset = store.numel;
      slot.numel = plan.matrices[matrix].numel();
      slot.owned = store.owned;
      store.numel += slot.numel;
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
  slot.strides = contiguous_strides(slot.sizes);
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
  const at::Tensor& master = segments_[slot.segment].master;
  return master.narrow(0, slot.offset, slot.numel).view(slot.sizes);
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
  lay_out(compute_dtype, slots_.front().parameter.device());
  for (auto& segment : segments_) {
    if (segment.owned) move_master(segment);
    if (segment.numel > 0) parts_.push_back({segment.flat, segment.owner});
  }
  others_.free();
  prepared_ = true;
}

// Views can be made of allocated memory only.
void UnitStore::lay_out(at::ScalarType dtype, const at::Device& device) {
  int64_t numel[2] = {0, 0};
  for (const auto& segment : segments_) numel[segment.owned] += segment.numel;
  own_ = FlatBuffer(numel[1], dtype, device);
  others_ = FlatBuffer(numel[0], dtype, device);
  int64_t offset[2] = {0, 0};
  for (auto& segment : segments_) {
    FlatBuffer& buffer = segment.owned ? own_ : others_;
    buffer.allocate();
    segment.flat = buffer.view(offset[segment.owned], {segment.numel});
    for (int i = 0; i < segment.slots; ++i) {
      Slot& slot = slots_[segment.first_slot + i];
      slot.whole = buffer.view(offset[segment.owned] + slot.offset, slot.sizes);
    }
    offset[segment.owned] += segment.numel;
  }
}

void UnitStore::move_master(SegmentStore& segment) {
  segment.flat.copy_(segment.master);
  if (segment.master.scalar_type() == segment.flat.scalar_type()) segment.master = segment.flat;
}

const std::vector<Broadcast>& UnitStore::allocate() {
  others_.allocate();
  return parts_;
}

void UnitStore::show_whole() {
  for (auto& slot : slots_) show(slot.parameter, slot.whole);
  shown_ = true;
}

void UnitStore::release() {
  if (!shown_) return;
  for (auto& slot : slots_) show(slot.parameter, slot.placeholder);
  others_.free();
  shown_ = false;
}

bool UnitStore::publishes() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const SegmentStore& segment) {
    return segment.master.defined() && segment.master.scalar_type() != segment.flat.scalar_type();
  });
}

void UnitStore::publish() {
  for (auto& segment : segments_) {
    if (segment.owned && !segment.master.is_same(segment.flat)) segment.flat.copy_(segment.master);
  }
}

void UnitStore::verify(const OwnershipPlan& plan) const {
  for (const auto& slot : slots_) {
    const at::Tensor& expected = shown_ ? slot.whole : slot.placeholder;
    if (!shown_ && expected.defined() && !is_placeholder(expected)) {
      throw ConfigError(
          message("parameter '", plan.matrices[slot.matrix].name,
                  "' was written in place after dedicate_params, where it shows a placeholder; the "
                  "value is lost. Initialise the model before dedicate_params, or use "
                  "load_state_dict."));
    }
    if (shows(slot.parameter, expected)) continue;
    throw ConfigError(
        message("parameter '", plan.matrices[slot.matrix].name,
                "' was changed behind dmuon's back: its data was replaced (`.data = ...`, "
                "`.to(...)`, `.bfloat16()`) after dedicate_params. Cast or move the model before "
                "dedicate_params; to set its value use load_state_dict."));
  }
}

}  // namespace dmuon

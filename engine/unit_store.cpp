#include "engine/unit_store.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

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

Slot make_slot(const OwnershipPlan& plan, int32_t matrix, const Position& me,
               const TpLayout& layout) {
  Slot slot{.matrix = matrix, .layout = layout};
  slot.numel = layout.cut() ? layout.numel_on(me.tp) : plan.matrices[matrix].numel();
  slot.tp_owner = plan.tp_owners[matrix];
  return slot;
}

// The wrapper's dtype is what autograd goes by.
void show_slot(const Slot& slot, const at::Tensor& view) {
  show(slot.inner, view);
  if (!slot.wrapper) return;
  auto* impl = slot.parameter.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(impl->unsafe_storage(), view.dtype());
}

}  // namespace

UnitStore::UnitStore(const OwnershipPlan& plan, int unit, const Position& me,
                     const std::vector<TpLayout>& layouts)
    : name_(plan.units[unit].name), packed_(plan.policy.pack) {
  std::vector<const Segment*> segments;
  for (const auto& segment : plan.units[unit].segments) segments.push_back(&segment);
  const auto holder = [&](const Segment* s) { return s->owner % plan.mesh.shard; };
  // A holder's segments side by side: one message.
  if (packed_) {
    std::stable_sort(segments.begin(), segments.end(),
                     [&](const auto* a, const auto* b) { return holder(a) < holder(b); });
  }
  for (const Segment* segment : segments) add_segment(plan, *segment, me, layouts);
}

void UnitStore::add_segment(const OwnershipPlan& plan, const Segment& segment, const Position& me,
                            const std::vector<TpLayout>& layouts) {
  SegmentStore store{.holder = static_cast<int32_t>(segment.owner % plan.mesh.shard),
                     .replica = static_cast<int32_t>(segment.owner / plan.mesh.shard),
                     .first_slot = static_cast<int32_t>(slots_.size()),
                     .slots = static_cast<int32_t>(segment.matrices.size())};
  store.held = store.holder == me.shard;
  store.owned = store.held && store.replica == me.replicate;
  for (const int32_t matrix : segment.matrices) {
    Slot slot = make_slot(plan, matrix, me, layouts.empty() ? TpLayout() : layouts[matrix]);
    slot.segment = static_cast<int32_t>(segments_.size());
    slot.offset = store.numel;
    slot.owned = store.owned;
    slot.leads = store.owned && slot.tp_owner == me.tp;
    slot.shared = store.owned && plan.mesh.tp > 1 && plan.matrices[matrix].route == Route::muon;
    store.numel += slot.numel;
    slots_.push_back(std::move(slot));
    keep_in_shards(static_cast<int>(slots_.size()) - 1, false);
  }
  segments_.push_back(std::move(store));
}

void UnitStore::keep_in_shards(int index, bool kept) {
  Slot& slot = slots_[index];
  slot.in_shards = slot.shared && slot.layout.cut() && kept;
  slot.scatters = slot.shared && !slot.in_shards;
  slot.gathers = slot.scatters && slot.layout.cut();
}

void UnitStore::adopt(int index, const at::Tensor& parameter, const at::Tensor& inner,
                      std::shared_ptr<TensorWrapper> wrapper) {
  Slot& slot = slots_[index];
  // to_empty swaps what a tensor subclass stands on, where nobody else holds it.
  if (inner.is_meta() && wrapper) return;
  slot.parameter = parameter;
  slot.inner = inner;
  slot.wrapper = std::move(wrapper);
  slot.sizes = inner.sizes().vec();
  slot.strides = contiguous_strides(slot.sizes);
  if (inner.numel() != slot.numel) {
    throw ConfigError(message("unit '", name_, "': a parameter has ", inner.numel(),
                              " elements on this rank instead of ", slot.numel, "."));
  }
  if (inner.is_meta()) return;
  auto& segment = segments_[slot.segment];
  if (slot.owned) {
    if (!segment.master.defined()) {
      segment.master = at::empty({segment.numel},
                                 inner.options().dtype(master_dtype(inner)).requires_grad(false));
    }
    part_of_master(slot).copy_(inner.detach());
  }
  slot.placeholder = make_placeholder(inner);
  show_slot(slot, slot.placeholder);
}

bool UnitStore::adopted() const {
  return std::all_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.placeholder.defined(); });
}

at::TensorOptions UnitStore::float_options() const {
  return slots_.front().placeholder.options().dtype(at::kFloat).requires_grad(false);
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
  if (slot.owned) part_of_master(slot).copy_(value);
  if (prepared_ && segments_[slot.segment].held) slot.whole.variable_data().copy_(value);
}

void UnitStore::prepare(at::ScalarType compute_dtype) {
  if (prepared_) return;
  lay_out(compute_dtype, slots_.front().inner.device());
  for (auto& segment : segments_) {
    if (segment.owned) move_master(segment);
  }
  list_parts();
  others_.free();
  prepared_ = true;
}

// Views can be made of allocated memory only.
void UnitStore::lay_out(at::ScalarType dtype, const at::Device& device) {
  int64_t numel[2] = {0, 0};
  for (const auto& segment : segments_) numel[segment.held] += segment.numel;
  kept_ = FlatBuffer(numel[1], dtype, device);
  others_ = FlatBuffer(numel[0], dtype, device);
  int64_t offset[2] = {0, 0};
  for (auto& segment : segments_) {
    FlatBuffer& buffer = segment.held ? kept_ : others_;
    buffer.allocate();
    segment.flat = buffer.view(offset[segment.held], {segment.numel});
    for (int i = 0; i < segment.slots; ++i) {
      Slot& slot = slots_[segment.first_slot + i];
      slot.whole = buffer.view(offset[segment.held] + slot.offset, slot.sizes);
    }
    offset[segment.held] += segment.numel;
  }
}

// What one holder has is one message, unless each matrix is to be one.
void UnitStore::list_parts() {
  int64_t offset[2] = {0, 0};
  for (size_t i = 0; i < segments_.size();) {
    const bool held = segments_[i].held;
    const int32_t holder = segments_[i].holder;
    int64_t numel = 0;
    do {
      if (held && segments_[i].numel > 0)
        replicated_.push_back({segments_[i].flat, segments_[i].replica});
      numel += segments_[i++].numel;
    } while (packed_ && i < segments_.size() && segments_[i].holder == holder);
    const FlatBuffer& buffer = held ? kept_ : others_;
    if (numel > 0) parts_.push_back({buffer.view(offset[held], {numel}), holder});
    offset[held] += numel;
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
  for (auto& slot : slots_) show_slot(slot, slot.whole);
  shown_ = true;
}

void UnitStore::release() {
  if (!shown_) return;
  for (auto& slot : slots_) show_slot(slot, slot.placeholder);
  others_.free();
  shown_ = false;
}

bool UnitStore::refreshes() const {
  return std::any_of(segments_.begin(), segments_.end(), [](const SegmentStore& segment) {
    return segment.master.defined() && segment.master.scalar_type() != segment.flat.scalar_type();
  });
}

void UnitStore::refresh() {
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
    if (shows(slot.inner, expected)) continue;
    throw ConfigError(
        message("parameter '", plan.matrices[slot.matrix].name,
                "' was changed behind dmuon's back: its data was replaced (`.data = ...`, "
                "`.to(...)`, `.bfloat16()`) after dedicate_params. Cast or move the model before "
                "dedicate_params; to set its value use load_state_dict."));
  }
}

}  // namespace dmuon

// The tensor-parallel part of Engine.
#include <algorithm>
#include <chrono>

#include "engine/engine.h"
#include "engine/stopwatch.h"

namespace dmuon {
namespace {

Engine::StagingUse add_up(const std::vector<int64_t>& elements, bool shared) {
  Engine::StagingUse use{.shared = shared};
  for (const int64_t count : elements) {
    use.largest = std::max(use.largest, count);
    use.total += count;
  }
  return use;
}

}  // namespace

// The TP owners get the gradients of this pass, beside what is left of it.
void Engine::start_gather(UnitRuntime& unit) {
  if (unit.gathering.empty()) return;
  unit.gathered = channels_.tp_lane->submit(
      [this, &unit] {
        const auto working = clock_.begin(Beside::tp);
        const auto start = std::chrono::steady_clock::now();
        std::vector<at::Tensor> pieces;
        for (const int s : unit.gathering) pieces.push_back(unit.reduction->result(s));
        unit.wholes = gather_gradients(unit.store, pieces, *channels_.tp_gather, gather_staging_);
        unit.gather_us = microseconds_since(start);
      },
      {unit.reduced});
}

bool Engine::gathers_are_current() const {
  if (!channels_.tp_gather) return true;
  for (const auto& unit : units_) {
    for (const int s : gathering_slots(unit.store)) {
      if (!unit.store.slots()[s].gathered_is_current()) return false;
    }
  }
  return true;
}

// Gradients were cleared, replaced or written since the pass that has gathered them.
void Engine::gather_again() {
  ++counters_.tp_regathers;
  const auto exchanging = clock_.in(Phase::tp_exchange);
  for (const int u : config_.order) {
    auto& unit = units_[u];
    const std::vector<int> gathering = gathering_slots(unit.store);
    if (gathering.empty()) continue;
    std::vector<at::Tensor> pieces, wholes;
    for (const int s : gathering) pieces.push_back(unit.store.slots()[s].gradient());
    channels_.tp_lane->run([&] {
      wholes = gather_gradients(unit.store, pieces, *channels_.tp_gather, gather_staging_);
    });
    for (size_t i = 0; i < gathering.size(); ++i) {
      Slot& slot = unit.store.slots()[gathering[i]];
      slot.gathered = wholes[i];
      slot.gathered_known = false;  // of `parameter.grad`, which may be another than `reduced`
    }
  }
}

void Engine::keep_in_shards(const std::vector<int32_t>& matrices) {
  for (int m = 0; m < static_cast<int>(places_.size()); ++m) {
    const bool kept = std::find(matrices.begin(), matrices.end(), m) != matrices.end();
    units_[places_[m].unit].store.keep_in_shards(places_[m].slot, kept);
  }
}

Engine::StagingUse Engine::gather_use() const {
  std::vector<int64_t> elements;
  for (const auto& unit : units_) {
    elements.push_back(
        gather_elements(unit.store, config_.position.tp, static_cast<int>(plan().mesh.tp)));
  }
  return add_up(elements, gather_staging_.shared());
}

Engine::StagingUse Engine::scatter_use() const {
  std::vector<int64_t> elements;
  for (const auto& unit : units_) {
    elements.push_back(
        scatter_elements(unit.store, config_.position.tp, static_cast<int>(plan().mesh.tp)));
  }
  return add_up(elements, scatter_staging_.shared());
}

// What is whole on every TP rank starts as the TP owner has it.
void Engine::equalise(UnitRuntime& unit) {
  std::vector<Broadcast> parts;
  const auto& slots = unit.store.slots();
  for (int s = 0; s < static_cast<int>(slots.size()); ++s) {
    if (!slots[s].owned || slots[s].layout.cut()) continue;
    parts.push_back({unit.store.master(s).view({-1}), slots[s].tp_owner});
  }
  if (parts.empty()) return;
  wait_published(unit);
  const auto exchanging = clock_.in(Phase::tp_exchange);
  channels_.tp_scatter->broadcast(parts, unit.store.name());
  unit.store.refresh();
}

}  // namespace dmuon

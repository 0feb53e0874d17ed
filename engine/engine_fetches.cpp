// The fetches of Engine: whole weights come from their holders, and the next unit's while one
// computes.
#include <utility>

#include "engine/engine.h"
#include "engine/task_scope.h"

namespace dmuon {

// On the host the training thread issues and the backend's threads carry; on an accelerator the
// lane does both. Every rank issues fetches in the same order.
void Engine::start_fetch(UnitRuntime& unit) {
  if (unit.fetch_issued) return;
  spread(unit);
  const auto& parts = unit.store.allocate();
  if (channels_.materialise->size() > 1) note(fetch_sequence_, unit.index);
  Transport& transport = *channels_.materialise;
  if (unit.store.float_options().device().is_cpu()) {
    wait_published(unit);
    const TaskScope scope;
    unit.fetching = transport.start_broadcast(parts, unit.store.name());
  } else {
    unit.fetched = channels_.materialise_lane->submit(
        [&transport, &parts, &unit] { transport.broadcast(parts, unit.store.name()); },
        {unit.published});
  }
  unit.fetch_issued = true;
  ++counters_.materialisations;
}

void Engine::finish_fetch(UnitRuntime& unit) {
  if (!std::exchange(unit.fetch_issued, false)) return;
  if (const auto fetching = std::exchange(unit.fetching, nullptr)) fetching->wait();
  unit.fetched.wait();
  unit.arriving.reset();
  unit.store.show_whole();
}

// One unit at most is whole ahead of its use.
void Engine::prefetch(int u) {
  auto& unit = units_[u];
  if (!config_.adapter->prefetches() || resident(unit)) return;
  if (unit.store.shown() || unit.fetch_issued || !unit.store.adopted()) return;
  const auto fetching = clock_.in(fetch_phase());
  drop_prefetch();
  start_fetch(unit);
  unit.arriving = clock_.begin(Beside::fetch);
  prefetched_ = u;
  ++counters_.prefetches;
}

// A forward that went another way than the one before has left a unit behind.
void Engine::drop_prefetch() {
  const int u = std::exchange(prefetched_, -1);
  if (u < 0 || !units_[u].fetch_issued) return;
  release(units_[u]);
}

// A forward has reached the unit: the next one is the one that came next last time.
void Engine::follow_forward(UnitRuntime& unit) {
  if (last_entered_ == unit.index) return;
  if (last_entered_ >= 0) units_[last_entered_].next = unit.index;
  last_entered_ = unit.index;
  if (unit.next >= 0) prefetch(unit.next);
}

void Engine::end_forward() {
  if (last_entered_ >= 0) units_[last_entered_].next = -1;
  last_entered_ = -1;
  drop_prefetch();
}

}  // namespace dmuon

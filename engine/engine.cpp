#include "engine/engine.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace dmuon {
namespace {

// Names in brackets are not units: "(setup)", "(agreement)", "(norm)".
int64_t unit_bytes(const FlightRing* ring) {
  return ring ? ring->total_sent_bytes() - ring->total_sent_bytes("(") : 0;
}

void wait_quietly(const Event& event) {
  try {
    event.synchronize();
  } catch (const std::exception&) {  // whoever needs it has been told, or is gone
  }
}

}  // namespace

Engine::Engine(EngineConfig config, Channels channels)
    : config_(std::move(config)),
      channels_(std::move(channels)),
      places_(plan().matrices.size()),
      gather_staging_(config_.share_gather_staging),
      scatter_staging_(config_.share_scatter_staging) {
  for (int u = 0; u < static_cast<int>(plan().units.size()); ++u) {
    units_.emplace_back(UnitStore(plan(), u, config_.position, config_.layouts), u);
    const auto& slots = units_[u].store.slots();
    for (int s = 0; s < static_cast<int>(slots.size()); ++s) places_[slots[s].matrix] = {u, s};
  }
  for (size_t b = 0; b < config_.boundaries.size(); ++b) {
    nodes_.push_back(std::make_shared<HookedNodes>());
    for (const int u : config_.boundaries[b]) units_[u].outer |= config_.encloses[b];
  }
}

// What is still to be published is: peers wait for it.
Engine::~Engine() {
  for (auto& unit : units_) wait_quietly(unit.published);
  finish_lanes();
}

// The lanes must be done with the units before these go away; a lane of our own ends with its task
// in progress.
void Engine::finish_lanes() {
  const bool shared = channels_.reduce_lane.use_count() > 1 || channels_.tp_lane.use_count() > 1;
  for (auto& unit : units_) {
    if (!shared) break;
    wait_quietly(unit.reduced);
    wait_quietly(unit.gathered);
  }
  channels_.materialise_lane.reset();
  channels_.reduce_lane.reset();
  channels_.publish_lane.reset();
  channels_.tp_lane.reset();
}

// One that has ended costs no look at the clock.
void Engine::wait_published(const UnitRuntime& unit) {
  if (unit.published.query()) return unit.published.wait();
  const auto waiting = clock_.in(Phase::publish);
  unit.published.wait();
}

Slot& Engine::slot(int matrix) {
  const Place place = places_[matrix];
  return units_[place.unit].store.slots()[place.slot];
}

const Slot& Engine::slot(int matrix) const {
  const Place place = places_[matrix];
  return units_[place.unit].store.slots()[place.slot];
}

void Engine::adopt(int matrix, const at::Tensor& parameter, const at::Tensor& inner,
                   std::shared_ptr<TensorWrapper> wrapper) {
  auto& unit = units_[places_[matrix].unit];
  slot(matrix).hook.reset();
  unit.store.adopt(places_[matrix].slot, parameter, inner, std::move(wrapper));
}

void Engine::set_value(int matrix, const at::Tensor& value) {
  auto& unit = units_[places_[matrix].unit];
  wait_published(unit);
  unit.store.set_value(places_[matrix].slot, value);
  mark_changed(matrix);
}

void Engine::mark_changed(int matrix) {
  auto& unit = units_[places_[matrix].unit];
  unit.stale = true;
  release(unit);
}

void Engine::advance(UnitRuntime& unit, UnitCall call) {
  unit.state = next_state(unit.state, call, unit.store.name());
}

void Engine::note(int64_t& sequence, int64_t event) {
  sequence = static_cast<int64_t>(static_cast<uint64_t>(sequence) * 0x9e3779b97f4a7c15 + event + 1);
}

// The two kinds run in their own order each; how they mix is a matter of timing.
int64_t Engine::take_sequence_hash() {
  const int64_t fetches = std::exchange(fetch_sequence_, 0);
  return fetches ^ (std::exchange(reduce_sequence_, 0) << 1);
}

bool Engine::trainable(const UnitRuntime& unit) const {
  const auto& slots = unit.store.slots();
  return std::any_of(slots.begin(), slots.end(),
                     [](const Slot& slot) { return slot.parameter.requires_grad(); });
}

void Engine::enter(int boundary) {
  const bool recomputing = graph_task_id() >= 0;
  if (in_pass_ && !recomputing) reset();  // a backward pass ended with an exception
  if (recomputing)
    begin_pass();
  else
    clock_.turn(Phase::forward);
  for (const int u : config_.boundaries[boundary]) {
    auto& unit = units_[u];
    require_adopted(unit);
    advance(unit, UnitCall::enter);
    ++unit.depth;
    unit.store.verify(plan());
    if (!unit.armed) forget_cleared(unit);
    if (recomputing) {
      fetch(unit);
    } else {
      materialise(unit);
      follow_forward(unit);
    }
    watch(unit);
  }
}

void Engine::require_adopted(const UnitRuntime& unit) {
  if (!unit.store.adopted()) {
    throw ConfigError(message("unit '", unit.store.name(),
                              "' is used while its parameters are still on the meta device. Call "
                              "model.to_empty(device=...) and initialise them first."));
  }
}

// After zero_grad nobody else holds the old gradients.
void Engine::forget_cleared(UnitRuntime& unit) {
  for (auto& slot : unit.store.slots()) {
    if (!slot.parameter.grad().defined()) slot.forget_gradients();
  }
}

void Engine::leave(int boundary, const std::vector<at::Tensor>& outputs) {
  const auto& used = config_.boundaries[boundary];
  int hooked = 0;
  if (!outputs.empty() && c10::GradMode::is_enabled()) {
    std::vector<int64_t> epochs;
    for (const int u : used) epochs.push_back(units_[u].epoch);
    // A call has as many hooks as outputs; the first that a pass reaches stands for all.
    auto reached_in = std::make_shared<int64_t>(0);
    const auto hook = [weak = weak_from_this(), boundary, epochs, reached_in] {
      const auto engine = weak.lock();
      if (!engine) return;
      engine->begin_pass();
      if (std::exchange(*reached_in, engine->passes_) == engine->passes_) return;
      engine->pre_backward(boundary, epochs);
    };
    hooked = before_backward(outputs, hook, nodes_[boundary]);
  }
  const bool in_backward = graph_task_id() >= 0;
  for (const int u : used) {
    auto& unit = units_[u];
    advance(unit, UnitCall::leave);
    unit.depth = std::max(0, unit.depth - 1);
    unit.last_left = ++forwards_;
    // Nothing to hook, and perhaps something we have not found.
    unit.keep = !hooked && c10::GradMode::is_enabled() && (outputs.empty() || trainable(unit));
    const bool resident = config_.adapter->residency(u) == Residency::resident_after_forward;
    if (unit.depth == 0 && !in_backward && !unit.keep && !resident) release(unit);
  }
}

bool Engine::resident(const UnitRuntime& unit) const {
  return config_.adapter->residency(unit.index) == Residency::resident;
}

void Engine::show_residents() {
  for (const int u : config_.order) {
    if (resident(units_[u]) && units_[u].store.adopted()) materialise(units_[u]);
  }
}

void Engine::spread_values() {
  for (const int u : config_.order) {
    if (units_[u].stale && units_[u].store.adopted()) spread(units_[u]);
  }
}

void Engine::spread(UnitRuntime& unit) {
  if (!unit.store.prepared()) wait_published(unit);
  unit.store.prepare(config_.adapter->compute_dtype(unit.index));
  if (unit.stale) submit_publish(unit, false, {});
}

void Engine::materialise(UnitRuntime& unit) {
  if (unit.store.shown() && !unit.stale) {
    if (resident(unit)) wait_published(unit);
    return;
  }
  const auto fetching = clock_.in(fetch_phase());
  start_fetch(unit);
  finish_fetch(unit);
}

void Engine::release(UnitRuntime& unit) {
  unit.keep = false;
  if (resident(unit)) return;
  if (unit.fetch_issued) {
    const auto fetching = clock_.in(fetch_phase());
    finish_fetch(unit);
  }
  unit.store.release();
}

// Parameters are watched from their first use on; one that is unfrozen later, from then on.
void Engine::watch(UnitRuntime& unit) {
  const int u = unit.index;
  auto& slots = unit.store.slots();
  for (int s = 0; s < static_cast<int>(slots.size()); ++s) {
    if (slots[s].hook || !slots[s].parameter.requires_grad()) continue;
    slots[s].hook.emplace(slots[s].parameter, [weak = weak_from_this(), u, s] {
      if (auto engine = weak.lock()) engine->accumulated(u, s);
    });
  }
}

void Engine::begin_step() {
  if (graph_task_id() >= 0) {
    throw ConfigError(
        "optimizer.step() was called inside a backward pass. Call it after backward().");
  }
  if (in_pass_) reset();
  clock_.turn(Phase::checks);
  end_forward();
  wait_reductions();
  wait_publishes();
  for (auto& unit : units_) {
    advance(unit, UnitCall::step);
    unit.depth = 0;
    release(unit);
  }
}

void Engine::publish(int u, bool owned, std::function<void()> last) {
  auto& unit = units_[u];
  advance(unit, UnitCall::publish);
  ++unit.epoch;
  if (unit.store.prepared() && (owned || channels_.publish) && trainable(unit)) {
    submit_publish(unit, owned, std::move(last));
  } else if (last) {
    unit.published = channels_.publish_lane->submit(std::move(last));
  }
}

void Engine::publish_all() {
  for (const int u : config_.order) {
    if (units_[u].store.prepared()) submit_publish(units_[u], true, {});
  }
}

void Engine::submit_publish(UnitRuntime& unit, bool owned, std::function<void()> last) {
  if (std::exchange(unit.stale, false) && channels_.tp_scatter) equalise(unit);
  const bool refreshes = owned && unit.store.refreshes();
  if (!refreshes && !channels_.publish && !last) return;
  const auto publishing = clock_.in(Phase::publish);
  unit.published = channels_.publish_lane->submit([this, &unit, refreshes, last = std::move(last)] {
    const auto working = clock_.begin(Beside::publish);
    if (last) last();
    if (refreshes) unit.store.refresh();
    if (channels_.publish) channels_.publish->broadcast(unit.store.replicated(), unit.store.name());
  });
}

void Engine::end_step(bool updated) {
  for (auto& unit : units_) advance(unit, UnitCall::finish);
  clock_.turn(Phase::other);
  ++counters_.steps;
  if (!updated) ++counters_.steps_without_gradient;
  const int64_t bytes = unit_bytes(ring());
  counters_.sent_bytes_last_step = bytes - std::exchange(bytes_at_step_, bytes);
  if (ring()) ring()->set_step(counters_.steps);
}

bool Engine::has_local_gradient(const UnitRuntime& unit) {
  const auto& slots = unit.store.slots();
  return std::any_of(slots.begin(), slots.end(), [](const Slot& slot) {
    return slot.local.defined() && slot.parameter.grad().is_same(slot.shown_grad);
  });
}

bool Engine::has_local_gradients() const {
  return std::any_of(units_.begin(), units_.end(), &Engine::has_local_gradient);
}

void Engine::wait_publishes() {
  const auto waiting = clock_.in(Phase::publish);
  for (auto& unit : units_) unit.published.wait();
}

}  // namespace dmuon

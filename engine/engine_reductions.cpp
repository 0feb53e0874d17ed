// The reductions of Engine: gradients leave for their owners, and what arrives is handed out.
#include <ATen/core/Tensor.h>

#include <chrono>
#include <utility>

#include "engine/engine.h"
#include "engine/stopwatch.h"

namespace dmuon {
namespace {

// Bytes. Handing work to another thread and back costs about 10 us, in which one core sums 100 kB.
constexpr int64_t kWorthAThread = 1 << 20;

}  // namespace

void Engine::issue(UnitRuntime& unit) {
  const int u = unit.index;
  const auto issuing = clock_.in(Phase::reduce_issue);
  arm(unit);
  collect(unit);
  advance(unit, UnitCall::reduce);
  unit.issued = true;
  unit.refired = false;
  ++counters_.reductions;
  note(reduce_sequence_, u);
  unit.reduction = std::make_unique<Reduction>(
      unit.store, take_local(unit), config_.adapter->reduce_dtype(u), config_.adapter->divisor(u));
  unit.gathering = channels_.tp_gather ? gathering_slots(unit.store) : std::vector<int>();
  start(unit);
  start_gather(unit);
}

std::vector<at::Tensor> Engine::take_local(UnitRuntime& unit) {
  std::vector<at::Tensor> gradients;
  for (auto& slot : unit.store.slots()) {
    keep_local(slot);
    gradients.push_back(std::exchange(slot.local, at::Tensor()));
  }
  return gradients;
}

// On the host the training thread issues, so that all ranks issue in one order, and the backend's
// threads carry; what is then worth a thread of ours is summed beside backward, the rest when it is
// collected. On an accelerator all of it is enqueued on the lane.
void Engine::start(UnitRuntime& unit) {
  Reduction& reduction = *unit.reduction;
  Transport& shard = *channels_.reduce;
  Transport* const replicate = channels_.replicate_reduce.get();
  const bool host = reduction.on_host();
  if (host) reduction.start(shard);
  unit.finish_here =
      host && reduction.nbytes() < kWorthAThread && !replicate && unit.gathering.empty();
  auto reducing = clock_.begin(Beside::reduce);
  if (unit.finish_here) {
    unit.reducing = std::move(reducing);
    return;
  }
  unit.reduced = channels_.reduce_lane->submit([&reduction, &shard, replicate, host, reducing] {
    if (!host) reduction.start(shard);
    reduction.finish(replicate);
  });
}

// Adds what this pass has brought to what earlier ones have left, in float32.
void Engine::keep_local(Slot& slot) {
  const at::Tensor fresh =
      slot.unwrapped(std::exchange(slot.parameter.mutable_grad(), at::Tensor()));
  if (!fresh.defined()) return;
  if (!slot.local.defined()) {
    slot.local = fresh;
    return;
  }
  if (slot.local.scalar_type() != at::kFloat) slot.local = slot.local.to(at::kFloat);
  slot.local.add_(fresh);
}

// A failure stays: whoever comes again meets it again.
void Engine::finish(UnitRuntime& unit) {
  if (unit.finish_here) {
    unit.reduction->finish(nullptr);
  } else {
    unit.reduced.wait();
  }
  unit.reducing.reset();
}

// The reduction in flight, if any, is added to what earlier passes have brought to the owner.
void Engine::collect(UnitRuntime& unit) {
  if (!unit.reduction) return;
  const auto waiting = clock_.in(Phase::reduce_wait);
  finish(unit);
  if (!unit.gathering.empty()) {
    const auto exchanging = clock_.in(Phase::tp_exchange);
    const auto start = std::chrono::steady_clock::now();
    unit.gathered.wait();
    counters_.tp_wait_us += microseconds_since(start);
    counters_.tp_gather_us += std::exchange(unit.gather_us, 0);
  }
  add_reduced(unit);
  unit.reduction.reset();
  unit.gathering.clear();
  unit.wholes.clear();
}

void Engine::add_reduced(UnitRuntime& unit) {
  auto& slots = unit.store.slots();
  const auto add = [](at::Tensor& sum, const at::Tensor& term) {
    if (sum.defined() && term.defined())
      sum.add_(term);
    else if (term.defined())
      sum = term;
  };
  size_t next = 0;
  for (int s = 0; s < static_cast<int>(slots.size()); ++s) {
    Slot& slot = slots[s];
    const bool gathers = next < unit.gathering.size() && unit.gathering[next] == s;
    const bool together = gathers && slot.gathered_matches();
    add(slot.reduced, unit.reduction->result(s));
    if (!gathers) continue;
    add(slot.gathered, unit.wholes[next++]);
    slot.gathered_known = false;
    if (together) slot.note_gathered();
  }
}

void Engine::hand_out(UnitRuntime& unit) {
  for (auto& slot : unit.store.slots()) {
    if (unit.refired || !unit.issued) keep_local(slot);
    if (slot.reduced.defined() && slot.local.defined()) {
      // On top of a reduced gradient, and not reduced: this rank's part of the mean.
      slot.reduced.add_(std::exchange(slot.local, at::Tensor()),
                        1 / config_.adapter->divisor(unit.index));
    }
    slot.show_gradient(slot.reduced.defined() ? slot.reduced : slot.local);
  }
  unit.armed = unit.issued = unit.refired = false;
}

// As at the end of a pass that reaches every unit that has something to reduce.
void Engine::reduce_accumulated() {
  wait_reductions();
  std::vector<bool> here(units_.size(), false);
  for (size_t u = 0; u < units_.size(); ++u) here[u] = has_local_gradient(units_[u]);
  const std::vector<bool> anywhere = touched_anywhere(here);
  for (const int u : config_.order) {
    if (anywhere[u] && trainable(units_[u])) issue(units_[u]);
  }
  wait_reductions();
}

void Engine::wait_reductions() {
  if (in_pass_) return;
  const auto waiting = clock_.in(Phase::reduce_wait);
  const auto start = std::chrono::steady_clock::now();
  for (auto& unit : units_) {
    collect(unit);
    if (unit.armed) hand_out(unit);
  }
  counters_.reduce_wait_us += microseconds_since(start);
}

}  // namespace dmuon

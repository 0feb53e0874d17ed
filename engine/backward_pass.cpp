// The backward half of Engine: which gradients have come, and when they leave.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "engine/error.h"

namespace dmuon {
// Called before autograd uses the gradient of an output of the boundary, once for each call of it.
void Engine::pre_backward(int boundary, const std::vector<int64_t>& epochs) {
  release_finished(boundary);
  const auto& used = config_.boundaries[boundary];
  for (size_t i = 0; i < used.size(); ++i) {
    auto& unit = units_[used[i]];
    if (unit.epoch != epochs[i]) {
      throw ConfigError(message("backward through unit '", unit.store.name(),
                                "' after optimizer.step() has changed its weights: its forward ran "
                                "before that step. Run the forward again."));
    }
    advance(unit, UnitCall::pre_backward);
    arm(unit);
    fetch(unit);
  }
}

// A pass begins at the first hook that runs inside it. That is in the outermost graph task: the
// recomputation of a checkpointed segment runs in the task around it. So the callback queued here
// is the one that ends the whole pass.
void Engine::begin_pass() {
  if (in_pass_ && pass_alive_.expired()) reset();  // the last one ended with an exception
  if (in_pass_) return;
  clock_.turn(Phase::backward);
  end_forward();
  config_.adapter->begin_pass();
  in_pass_ = true;
  ++passes_;
  fetched_ = reduced_ = 0;
  pass_order_.clear();
  const auto here = touched_here();
  const auto anywhere = touched_anywhere(here);
  std::vector<int32_t> order = config_.order;
  // Weights that are everywhere are fetched from nobody: forwards may differ, the order may not.
  if (!resident(units_.front())) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return units_[a].last_left > units_[b].last_left; });
  }
  for (const int u : order) {
    units_[u].position = -1;
    units_[u].touched = here[u];
    if (anywhere[u]) join_pass(units_[u]);
  }
  auto alive = std::make_shared<int>();
  pass_alive_ = alive;
  at_end_of_backward([weak = weak_from_this(), alive] {
    if (auto engine = weak.lock()) engine->end_pass();
  });
}

std::vector<bool> Engine::touched_here() const {
  std::vector<bool> touched(units_.size(), false);
  for (size_t b = 0; b < nodes_.size(); ++b) {
    if (!nodes_[b]->any_in_current_pass()) continue;
    for (const int u : config_.boundaries[b]) touched[u] = true;
  }
  for (size_t u = 0; u < units_.size(); ++u) {
    if (touched[u]) continue;  // else: perhaps through an output that no hook could be put on
    const auto& slots = units_[u].store.slots();
    touched[u] = std::any_of(slots.begin(), slots.end(), [](const Slot& slot) {
      return slot.hook && slot.hook->in_current_pass();
    });
  }
  return touched;
}

// One small collective per pass: a rank whose loss leaves a unit out takes part in its collectives.
std::vector<bool> Engine::touched_anywhere(const std::vector<bool>& here) {
  if (channels_.control->size() == 1) return here;
  at::Tensor mask = at::zeros({static_cast<int64_t>(here.size())}, at::kLong);
  auto* data = mask.data_ptr<int64_t>();
  const auto agreeing = clock_.in(Phase::agreement);
  std::copy(here.begin(), here.end(), data);
  channels_.control->all_reduce(mask, ReduceOp::max, "(pass)");
  return std::vector<bool>(data, data + here.size());
}

void Engine::join_pass(UnitRuntime& unit) {
  if (unit.position >= 0) return;
  unit.position = static_cast<int>(pass_order_.size());
  unit.reduces = trainable(unit) && config_.adapter->synchronize(unit.index);
  pass_order_.push_back(unit.index);
}

// Makes a unit whole in this pass, after all that come before it. Reentrant checkpointing may bring
// one that could not be foreseen: it joins at the end.
void Engine::fetch(UnitRuntime& unit) {
  join_pass(unit);
  while (static_cast<int>(fetched_) <= unit.position) fetch_next();
  materialise(unit);
  if (fetched_ < pass_order_.size()) prefetch(pass_order_[fetched_]);
}

void Engine::fetch_next() {
  auto& unit = units_[pass_order_[fetched_++]];
  materialise(unit);
  if (!unit.touched && !unit.armed && unit.depth == 0) release(unit);
}

// Puts earlier gradients aside: what this pass accumulates must be told apart from what has been
// reduced already. A gradient that the user has cleared or replaced is taken as it is.
void Engine::arm(UnitRuntime& unit) {
  if (unit.armed) return;
  unit.armed = true;
  unit.pending = 0;
  for (auto& slot : unit.store.slots()) {
    slot.fired = false;
    unit.pending += slot.parameter.requires_grad();
    const bool ours = slot.shows_ours();
    const at::Tensor current = std::exchange(slot.parameter.mutable_grad(), at::Tensor());
    if (ours) continue;
    // A gradient put in the place of a reduced one is reduced, any other is this rank's own.
    const bool was_reduced = slot.reduced.defined() && current.defined();
    slot.forget_gradients();
    (was_reduced ? slot.reduced : slot.local) = slot.unwrapped(current);
  }
}

// A parameter's gradient is complete for this pass. Two segments of reentrant checkpointing that
// share a parameter bring it twice.
void Engine::accumulated(int u, int s) {
  auto& unit = units_[u];
  begin_pass();
  if (!unit.armed) arm_late(unit, s);
  auto& slot = unit.store.slots()[s];
  if (unit.issued) unit.refired = true;
  if (std::exchange(slot.fired, true)) return;
  if (--unit.pending == 0) issue_ready();
}

// A unit is released when the pass has moved on to another one: an operation that uses a weight
// without asking for its gradient may still have come after the last gradient. All operations of a
// boundary that holds no other come before those of the boundaries forward has entered before it.
void Engine::release_finished(int boundary) {
  const auto& used = config_.boundaries[boundary];
  for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
    auto& unit = units_[u];
    const bool finished = unit.armed && unit.pending == 0 && unit.depth == 0 && !unit.outer;
    if (!unit.store.shown() || !finished) continue;
    if (std::find(used.begin(), used.end(), u) == used.end()) release(unit);
  }
}

// In the order of the pass: a unit that is complete early waits for those before it.
void Engine::issue_ready() {
  for (; reduced_ < pass_order_.size(); ++reduced_) {
    auto& unit = units_[pass_order_[reduced_]];
    if (!unit.reduces) continue;
    if (!unit.armed || unit.pending > 0) return;
    issue(unit);
  }
}

// The same collectives on every rank, whatever part of the model this rank has used.
void Engine::end_pass() {
  while (fetched_ < pass_order_.size()) fetch_next();
  for (; reduced_ < pass_order_.size(); ++reduced_) {
    auto& unit = units_[pass_order_[reduced_]];
    if (unit.reduces) issue(unit);
  }
  for (const int u : pass_order_) {
    if (units_[u].refired) issue(units_[u]);
  }
  for (auto& unit : units_) {
    if (unit.armed && !unit.issued) advance(unit, UnitCall::reduce);
    if (unit.depth == 0) release(unit);
  }
  in_pass_ = false;
  wait_reductions();
  clock_.turn(Phase::other);
}

// The first gradient of a unit none of whose outputs could be hooked. If autograd has added it in
// place to the gradient of an earlier pass, the two cannot be told apart any more.
void Engine::arm_late(UnitRuntime& unit, int s) {
  auto& slot = unit.store.slots()[s];
  const at::Tensor fresh = slot.parameter.mutable_grad();
  if (fresh.is_same(slot.shown_grad)) {
    throw ConfigError(
        message("unit '", unit.store.name(),
                "': no tensor was found in the output of its forward, so a second backward before "
                "zero_grad() cannot be kept apart from the first. Return the tensors in a tuple, "
                "list, dict or dataclass, or call zero_grad() between the two."));
  }
  slot.parameter.mutable_grad() = at::Tensor();
  arm(unit);
  slot.parameter.mutable_grad() = fresh;
  join_pass(unit);
}

// What an unfinished pass has reached is dropped: zero_grad may have been called since, and cannot
// be told from what the pass itself has put aside.
void Engine::reset() {
  in_pass_ = false;
  for (auto& unit : units_) {
    collect(unit);
    if (unit.armed) drop_gradients(unit);
    unit.depth = 0;
    release(unit);
    advance(unit, UnitCall::reset);
  }
  ++counters_.aborted_passes;
  clock_.turn(Phase::other);
}

void Engine::drop_gradients(UnitRuntime& unit) {
  for (auto& slot : unit.store.slots()) {
    slot.parameter.mutable_grad() = at::Tensor();
    slot.forget_gradients();
  }
  unit.armed = unit.issued = unit.refired = false;
}

}  // namespace dmuon

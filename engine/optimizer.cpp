#include "engine/optimizer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "engine/gradients.h"
#include "engine/tp_exchange.h"
#include "kernels/adamw.h"

namespace dmuon {
namespace {

const auto kFloat32 = at::TensorOptions().dtype(at::kFloat);

}  // namespace

Optimizer::Optimizer(std::shared_ptr<Engine> engine, OptimizerConfig config,
                     std::vector<int32_t> groups)
    : engine_(std::move(engine)),
      config_(std::move(config)),
      groups_(std::move(groups)),
      state_(engine_->plan().matrices.size()),
      ns_per_matrix_(engine_->plan().matrices.size(), 0) {
  config_.newton_schulz.validate();
  const OwnershipPlan& plan = engine_->plan();
  const auto tp = static_cast<int>(plan.mesh.tp);
  for (size_t m = 0; m < state_.size(); ++m) {
    const TpLayout& layout = engine_->slot(static_cast<int>(m)).layout;
    if (stays_in_shards(plan.matrices[m], layout, tp, config_.newton_schulz, config_.sharded_gram))
      in_shards_.push_back(static_cast<int32_t>(m));
  }
  engine_->keep_in_shards(in_shards_);
  for (size_t m = 0; m < state_.size(); ++m) allocate_state(static_cast<int>(m));
}

void Optimizer::allocate_state(int m) {
  const Slot& slot = engine_->slot(m);
  if (!slot.owned) return;
  const auto options = kFloat32.device(slot.inner.device());
  if (engine_->plan().matrices[m].route == Route::adamw) {
    state_[m]["exp_avg"] = at::zeros(slot.sizes, options);
    state_[m]["exp_avg_sq"] = at::zeros(slot.sizes, options);
    state_[m]["step"] = at::zeros({}, kFloat32);
    return;
  }
  if (!slot.leads && !slot.in_shards) return;
  const bool whole = slot.layout.cut() && !slot.in_shards;
  at::Tensor& momentum = state_[m]["momentum_buffer"];
  momentum = at::zeros(whole ? slot.layout.sizes : slot.sizes, options);
  if (!scratch_.defined() || scratch_.numel() < momentum.numel()) {
    scratch_ = at::empty({momentum.numel()}, options);
  }
}

bool Optimizer::step(const std::vector<GroupSettings>& groups, const SymmetricGradients& symmetric,
                     const std::string& error) {
  c10::NoGradGuard no_grad;
  engine_->begin_step();
  ns_calls_last_step_ = 0;
  StepWord mine = word(groups, symmetric);
  mine.failed |= !error.empty();
  const StepVerdict verdict = agreed(mine);
  const bool skipped = verdict.nonfinite && config_.nonfinite == Nonfinite::skip;
  const bool goes_on = verdict.any_gradient && !skipped;
  try {
    if (verdict.failed) raise_everywhere(error);
    check(verdict, symmetric);
    if (goes_on && verdict.gather_again) engine_->gather_again();
    if (goes_on) update_all(groups);
    if (!config_.publish_async) engine_->wait_publishes();
  } catch (...) {
    engine_->end_step(false);
    throw;
  }
  ns_calls_ += ns_calls_last_step_;
  engine_->end_step(goes_on);
  engine_->clock().turn(Phase::adamw);
  return goes_on;
}

StepVerdict Optimizer::agreed(const StepWord& mine) {
  const auto agreeing = engine_->clock().in(Phase::agreement);
  return agree_on_step(engine_->control(), mine);
}

// What has its Gram matrices on the way is waited for last. All ranks publish in one order,
// whatever they own.
void Optimizer::update_all(const std::vector<GroupSettings>& groups) {
  const auto updating = engine_->clock().in(Phase::newton_schulz);
  start_in_shards(groups);
  const auto& order = engine_->order();
  for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
    auto last = update_unit(*unit, groups);
    if (!has_in_shards(*unit)) {
      engine_->publish(*unit, owns_any(*unit), std::move(last));
    } else if (last) {
      const auto exchanging = engine_->clock().in(Phase::tp_exchange);
      last();
    }
  }
  finish_in_shards(groups);
  for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
    if (has_in_shards(*unit)) engine_->publish(*unit, owns_any(*unit));
  }
}

bool Optimizer::has_in_shards(int unit) const {
  return std::any_of(in_shards_.begin(), in_shards_.end(),
                     [&](int matrix) { return engine_->place(matrix).unit == unit; });
}

bool Optimizer::owns_any(int unit) const {
  const auto& segments = engine_->store(unit).segments();
  return std::any_of(segments.begin(), segments.end(), [](const auto& s) { return s.owned; });
}

std::function<void()> Optimizer::update_unit(int unit, const std::vector<GroupSettings>& groups) {
  update_locally(unit, groups);
  if (scattering_slots(engine_->store(unit)).empty()) return {};
  return scatter(unit, groups);
}

// What needs no other rank: the momentum and Newton-Schulz of matrices that are whole here, AdamW.
// Several threads share a list of matrices better than one matrix.
void Optimizer::update_locally(int unit, const std::vector<GroupSettings>& groups) {
  const bool together = at::get_num_threads() > 1;
  std::vector<Pending> list;
  int64_t taken = 0;
  for (const Slot& slot : engine_->store(unit).slots()) {
    if (slot.shared || !slot.parameter.requires_grad()) continue;
    const at::Tensor gradient = owned_gradient(*engine_, slot.matrix);
    if (!gradient.defined()) continue;
    const GroupSettings& group = groups[groups_[slot.matrix]];
    if (engine_->plan().matrices[slot.matrix].route == Route::adamw) {
      update_adamw(slot.matrix, gradient, group);
      continue;
    }
    list.push_back({slot.matrix, with_momentum(slot.matrix, gradient, group, taken), group});
    taken += list.back().u.numel();
    if (together) continue;
    finish_locally(list);
    taken = 0;
  }
  finish_locally(list);
}

void Optimizer::finish_locally(std::vector<Pending>& list) {
  orthogonalise(list);
  for (const Pending& p : list) apply(*engine_, config_.adjust_lr, p.matrix, p.u, p.group);
  list.clear();
}

// The TP owners' updates go to the ranks that hold the shards, beside the next Newton-Schulz. What
// is returned waits for them and applies them; it may outlive the optimizer, not the engine.
std::function<void()> Optimizer::scatter(int unit, const std::vector<GroupSettings>& groups) {
  const UnitStore& store = engine_->store(unit);
  std::vector<at::Tensor> updates;
  std::vector<std::pair<int, GroupSettings>> matrices;
  for (const int s : scattering_slots(store)) {
    const Slot& slot = store.slots()[s];
    const GroupSettings& group = groups[groups_[slot.matrix]];
    const at::Tensor gradient = whole_gradient(*engine_, slot.matrix);
    updates.push_back(gradient.defined() ? orthogonalised(slot.matrix, gradient, group)
                                         : at::Tensor());
    matrices.emplace_back(slot.matrix, group);
  }
  if (engine_->scatter_staging().shared()) engine_->wait_publishes();
  const auto exchanging = engine_->clock().in(Phase::tp_exchange);
  auto moving =
      std::make_shared<UpdateScatter>(store, updates, *engine_->tp(), engine_->scatter_staging());
  return [engine = engine_.get(), adjust = config_.adjust_lr, moving, matrices,
          under_way = engine_->clock().begin(Beside::tp)] {
    const std::vector<at::Tensor> pieces = moving->finish();
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto& [matrix, group] = matrices[i];
      if (pieces[i].defined()) apply(*engine, adjust, matrix, pieces[i], group);
    }
  };
}

void Optimizer::start_in_shards(const std::vector<GroupSettings>& groups) {
  sharded_units_.clear();
  if (in_shards_.empty()) return;
  const auto& order = engine_->order();
  for (auto unit = order.rbegin(); unit != order.rend(); ++unit) {
    const UnitStore& store = engine_->store(*unit);
    const std::vector<int> slots = slots_in_shards(store);
    if (slots.empty()) continue;
    auto sharded = std::make_unique<ShardedNewtonSchulz>(engine_->plan(), store,
                                                         config_.newton_schulz, *engine_->tp());
    for (const int s : slots) {
      const int matrix = store.slots()[s].matrix;
      const at::Tensor gradient = owned_gradient(*engine_, matrix);
      sharded->add(s, gradient.defined() ? with_momentum(matrix, gradient, groups[groups_[matrix]])
                                         : at::Tensor());
    }
    sharded->send_grams();
    if (!exchanging_) exchanging_ = engine_->clock().begin(Beside::tp);
    sharded_units_.emplace_back(*unit, std::move(sharded));
  }
}

void Optimizer::wait_for(ShardedNewtonSchulz& sharded) {
  const auto exchanging = engine_->clock().in(Phase::tp_exchange);
  sharded.wait();
}

void Optimizer::finish_in_shards(const std::vector<GroupSettings>& groups) {
  const int rounds = sharded_gram_rounds(config_.newton_schulz);
  for (int round = 0; round < rounds; ++round) {
    for (auto& [unit, sharded] : sharded_units_) {
      wait_for(*sharded);
      sharded->send_factors();
    }
    for (auto& [unit, sharded] : sharded_units_) {
      wait_for(*sharded);
      sharded->apply_factors();
      if (round + 1 < rounds) sharded->send_grams();
    }
  }
  exchanging_.reset();
  for (auto& [unit, sharded] : sharded_units_) {
    for (const auto& [slot, piece, led] : sharded->results()) {
      const int matrix = engine_->store(unit).slots()[slot].matrix;
      const GroupSettings& group = groups[groups_[matrix]];
      if (piece.defined()) apply(*engine_, config_.adjust_lr, matrix, piece, group);
      ns_per_matrix_[matrix] += led;
      ns_calls_last_step_ += led;
    }
  }
  sharded_units_.clear();
}

// Writes the momentum. What is returned lies in the scratch memory from `offset` on.
at::Tensor Optimizer::with_momentum(int matrix, const at::Tensor& gradient,
                                    const GroupSettings& group, int64_t offset) {
  at::Tensor& momentum = state_[matrix].at("momentum_buffer");
  const int64_t end = offset + momentum.numel();
  // What lies in the old one is kept alive by its views.
  if (scratch_.numel() < end) scratch_ = at::empty({end}, scratch_.options());
  at::Tensor input = scratch_.narrow(0, offset, momentum.numel()).view(momentum.sizes());
  momentum_update(momentum, gradient, group.momentum, config_.nesterov, input);
  return input;
}

void Optimizer::orthogonalise(const std::vector<Pending>& list) {
  std::vector<NsJob> jobs;
  for (const Pending& p : list) {
    const Matrix& shape = engine_->plan().matrices[p.matrix];
    const at::Tensor u = p.u.view({shape.batch, shape.rows, shape.cols});
    jobs.push_back({u, u});
    ++ns_per_matrix_[p.matrix];
  }
  newton_schulz(jobs, config_.newton_schulz, workspace_);
  ns_calls_last_step_ += static_cast<int64_t>(list.size());
}

// Momentum, then Newton-Schulz, of the whole matrix: in memory of its own, since it travels beside
// the next one's.
at::Tensor Optimizer::orthogonalised(int matrix, const at::Tensor& gradient,
                                     const GroupSettings& group) {
  const at::Tensor own = with_momentum(matrix, gradient, group).clone();
  orthogonalise({{matrix, own, group}});
  return own;
}

int64_t Optimizer::ns_workspace_bytes() const {
  return workspace_.bytes() + (scratch_.defined() ? static_cast<int64_t>(scratch_.nbytes()) : 0);
}

// `orthogonal`: what this rank holds of it.
void Optimizer::apply(Engine& engine, AdjustLr adjust, int matrix, const at::Tensor& orthogonal,
                      const GroupSettings& group) {
  const Matrix& shape = engine.plan().matrices[matrix];
  const auto place = engine.place(matrix);
  at::Tensor weight = engine.store(place.unit).master(place.slot);
  apply_update(weight, orthogonal, group.lr, group.weight_decay,
               adjusted_scale(adjust, shape.rows, shape.cols));
}

void Optimizer::update_adamw(int matrix, const at::Tensor& gradient, const GroupSettings& group) {
  const auto place = engine_->place(matrix);
  auto& state = state_[matrix];
  const double step = state.at("step").add_(1).item<double>();
  at::Tensor weight = engine_->store(place.unit).master(place.slot);
  adamw_update(weight, gradient, state.at("exp_avg"), state.at("exp_avg_sq"),
               {.lr = group.lr,
                .weight_decay = group.weight_decay,
                .beta1 = group.beta1,
                .beta2 = group.beta2,
                .eps = group.eps,
                .step = step});
}

}  // namespace dmuon

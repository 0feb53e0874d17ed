#include "adapters/ddp/distributed_muon.h"

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <numeric>

#include "engine/error.h"
#include "engine/gradients.h"

namespace dmuon {
namespace {

std::string problem_with(const MuonOptions& options) {
  try {
    check_options(options);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

// Muon's, and AdamW's: ranks compare both at each step.
std::vector<GroupSettings> settings_of(const MuonOptions& o) {
  return {{.lr = o.lr, .weight_decay = o.weight_decay, .momentum = o.momentum},
          {.lr = o.adamw_lr,
           .weight_decay = o.adamw_weight_decay,
           .beta1 = o.adamw_beta1,
           .beta2 = o.adamw_beta2,
           .eps = o.adamw_eps}};
}

}  // namespace

DistributedMuon::~DistributedMuon() = default;

void DistributedMuon::begin_forward() {
  replicas_->watch();
  const bool follow = options_.broadcast_buffers && model_->is_training() && no_sync_depth_ == 0;
  if (follow && !buffers_.empty()) replicas_->broadcast(buffers_, "(buffers)");
}

int DistributedMuon::boundary(const std::string& block) const {
  const auto& blocks = options_.blocks;
  const auto found = std::find(blocks.begin(), blocks.end(), block);
  if (found == blocks.end()) {
    throw ConfigError(message("forward('", block, "') is not one of the options' blocks. Name it ",
                              "there before the DistributedMuon is made."));
  }
  return static_cast<int>(found - blocks.begin()) + 1;
}

void DistributedMuon::read_gradients() {
  gradients_.tensors.clear();
  gradients_.indices.clear();
  for (size_t i = 0; i < symmetric_.size(); ++i) {
    if (!symmetric_[i].grad().defined()) continue;
    gradients_.tensors.push_back(symmetric_[i].grad());
    gradients_.indices.push_back(static_cast<int32_t>(i));
  }
}

// A gradient that nobody saw coming is reduced by nobody.
std::string DistributedMuon::problem() const {
  for (const auto& p : parameters_) {
    const int b = p.dedicated ? 1 + block_of(p.name, options_.blocks) : 0;
    if (entered_[b] || !p.value.grad().defined()) continue;
    return message("'", p.name, "' has a gradient, and no call of ",
                   b ? "'" + options_.blocks[b - 1] + "'" : "the model",
                   " went through forward(). Call it there, so that its gradients are averaged.");
  }
  return problem_with(options_);
}

void DistributedMuon::set_adamw_options() {
  for (auto& group : adamw_->param_groups()) {
    static_cast<torch::optim::AdamWOptions&>(group.options())
        .lr(options_.adamw_lr)
        .betas({options_.adamw_beta1, options_.adamw_beta2})
        .eps(options_.adamw_eps)
        .weight_decay(options_.adamw_weight_decay);
  }
}

bool DistributedMuon::step() {
  const c10::NoGradGuard no_grad;
  read_gradients();
  const bool goes_on = optimizer_->step(settings_of(options_), gradients_, problem());
  if (goes_on) {
    set_adamw_options();
    adamw_->step();
  }
  engine_->clock().end_step();
  return goes_on;
}

void DistributedMuon::zero_grad() {
  for (const auto& p : parameters_) p.value.mutable_grad().reset();
}

double DistributedMuon::clip_grad_norm(double max_norm, double p) {
  read_gradients();
  std::vector<int32_t> matrices(engine_->plan().matrices.size());
  std::iota(matrices.begin(), matrices.end(), 0);
  GradientSet set{.matrices = std::move(matrices)};
  (engine_->rank() == 0 ? set.counted : set.copies) = gradients_.tensors;
  return clip_gradients(*engine_, set, max_norm, p, /*error_if_nonfinite=*/false);
}

void DistributedMuon::wait() { engine_->wait_publishes(); }

std::map<std::string, int> DistributedMuon::owners() const {
  std::map<std::string, int> owners;
  const OwnershipPlan& plan = engine_->plan();
  for (size_t m = 0; m < plan.matrices.size(); ++m) owners[plan.matrices[m].name] = plan.owners[m];
  return owners;
}

DistributedMuon::NoSync::NoSync(DistributedMuon& trainer) : trainer_(trainer) {
  trainer_.adapter_->enter_no_sync();
  trainer_.replicas_->set_synchronize(++trainer_.no_sync_depth_ == 0);
}

DistributedMuon::NoSync::~NoSync() {
  trainer_.adapter_->leave_no_sync();
  trainer_.replicas_->set_synchronize(--trainer_.no_sync_depth_ == 0);
}

DistributedMuon::Call::Call(Engine& engine, int boundary) : engine_(engine), boundary_(boundary) {
  engine_.enter(boundary_);
}

DistributedMuon::Call::~Call() {
  if (left_) return;
  try {
    engine_.leave(boundary_, {});
  } catch (const std::exception&) {  // the first exception is on its way
  }
}

void DistributedMuon::Call::leave(const std::vector<at::Tensor>& outputs) {
  left_ = true;
  engine_.leave(boundary_, outputs);
}

}  // namespace dmuon

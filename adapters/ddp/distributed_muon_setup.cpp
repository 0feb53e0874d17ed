#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "adapters/ddp/distributed_muon.h"
#include "engine/agreement.h"
#include "engine/error.h"

namespace dmuon {
namespace {

// Two tensors of one shape and other values have another one, as a rule.
std::vector<std::pair<double, double>> fingerprints(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<double, double>> prints;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor values = tensor.detach().to(at::kDouble);
    prints.emplace_back(values.sum().item<double>(), values.square().sum().item<double>());
  }
  return prints;
}

}  // namespace

void check_options(const MuonOptions& o) {
  constexpr double any = std::numeric_limits<double>::infinity();
  const auto within = [](const char* name, double value, double end) {
    if (value >= 0 && value < end) return;
    throw ConfigError(message(name, " is ", value, "; it must be at least 0 and ",
                              end < any ? "below 1." : "finite."));
  };
  within("lr", o.lr, any);
  within("momentum", o.momentum, 1);
  within("weight_decay", o.weight_decay, any);
  within("adamw_lr", o.adamw_lr, any);
  within("adamw_beta1", o.adamw_beta1, 1);
  within("adamw_beta2", o.adamw_beta2, 1);
  within("adamw_eps", o.adamw_eps, any);
  within("adamw_weight_decay", o.adamw_weight_decay, any);
  if (o.ns_steps < 1) {
    throw ConfigError(message("ns_steps is ", o.ns_steps, "; it must be at least 1."));
  }
  if (o.bucket_bytes < 1) {
    throw ConfigError(message("bucket_bytes is ", o.bucket_bytes, "; it must be at least 1."));
  }
}

DistributedMuon::DistributedMuon(std::shared_ptr<torch::nn::Module> model,
                                 const MakeGroup& make_group, const Select& select,
                                 MuonOptions options)
    : model_(std::move(model)),
      options_(std::move(options)),
      ring_(std::make_shared<FlightRing>()) {
  auto control = make_transport(make_group, ring_.get(), Channel::control, "control");
  Proposal mine{.subject = "make the same DistributedMuon",
                .advice = "Build the same model with the same options on every rank."};
  OwnershipPlan plan;
  try {
    plan = make_plan_of(select, control->size());
    mine.lines = proposal(plan);
  } catch (const std::exception& error) {
    mine.error = error.what();
  }
  agree(*control, mine);
  read_parameters();
  make_engine(std::move(plan), std::move(control), make_group);
  make_replicas(make_group);
  for (const auto& p : parameters_) {
    if (p.dedicated) engine_->adopt(engine_->plan().find(p.name), p.value);
  }
  engine_->show_residents();
  make_optimizers();
}

OwnershipPlan DistributedMuon::make_plan_of(const Select& select, int64_t ranks) {
  if (!model_) throw ConfigError("the model is null. Give a torch::nn::Module.");
  if (!select) throw ConfigError("the selection is empty. Give a function that chooses matrices.");
  check_options(options_);
  parameters_ = select_parameters(*model_, select);
  return make_plan(as_matrices(*model_, parameters_, options_.blocks), {.replicate = ranks},
                   {.ns_steps = options_.ns_steps});
}

std::vector<std::string> DistributedMuon::proposal(const OwnershipPlan& plan) const {
  std::vector<std::string> lines;
  for (const auto& p : parameters_) {
    lines.push_back(message(p.name, "\t", p.dedicated ? "muon" : "adamw", ", number ", lines.size(),
                            ", ", p.value.toString(), " ", p.value.sizes()));
  }
  const MuonOptions& o = options_;
  std::string blocks;
  for (const auto& block : o.blocks) blocks += block + " ";
  lines.push_back(message("the options\tplan ", plan.digest.words[0], " ", plan.digest.words[1],
                          ", ns_steps ", o.ns_steps, ", nesterov ", o.nesterov, ", adjust_lr ",
                          static_cast<int>(o.adjust_lr), ", nonfinite ",
                          static_cast<int>(o.nonfinite), ", publish_async ", o.publish_async,
                          ", blocks ", blocks, ", bucket_bytes ", o.bucket_bytes,
                          ", broadcast_buffers ", o.broadcast_buffers));
  return lines;
}

void DistributedMuon::read_parameters() {
  for (const auto& p : parameters_) {
    if (p.dedicated) continue;
    symmetric_.push_back(p.value);
    gradients_.names.push_back(p.name);
  }
  for (const at::Tensor& buffer : model_->buffers()) {
    if (buffer.defined() && buffer.numel() > 0) buffers_.push_back(buffer);
  }
}

Channels DistributedMuon::channels(std::unique_ptr<Transport> control,
                                   const MakeGroup& make_group) const {
  const at::Device device = parameters_.front().value.device();
  Channels channels{.materialise = make_local_transport(),
                    .reduce = make_local_transport(),
                    .materialise_lane = make_lane("materialise", device),
                    .reduce_lane = make_lane("reduce", device),
                    .publish_lane = make_lane("publish", device),
                    .tp_lane = make_lane("tp", device)};
  if (control->size() > 1) {
    channels.replicate_reduce = make_transport(make_group, ring_.get(), Channel::replicate_reduce,
                                               to_string(Channel::replicate_reduce));
    channels.publish =
        make_transport(make_group, ring_.get(), Channel::publish, to_string(Channel::publish));
  }
  channels.control = std::move(control);
  return channels;
}

void DistributedMuon::make_engine(OwnershipPlan plan, std::unique_ptr<Transport> control,
                                  const MakeGroup& make_group) {
  adapter_ = std::make_shared<DdpAdapter>(static_cast<int>(plan.units.size()), control->size());
  EngineConfig config{.plan = std::move(plan),
                      .adapter = adapter_,
                      .ring = ring_,
                      .position = {.replicate = control->rank()}};
  set_boundaries(config);
  entered_.resize(config.boundaries.size(), false);
  auto channels = this->channels(std::move(control), make_group);
  engine_ = std::make_shared<Engine>(std::move(config), std::move(channels));
  for (const auto& p : parameters_) {
    if (!p.dedicated) continue;
    const int unit = engine_->place(engine_->plan().find(p.name)).unit;
    adapter_->unit(unit).compute_dtype = p.value.scalar_type();
  }
}

// The model first, with whatever no block reports. A tied matrix is in the boundary of each name.
void DistributedMuon::set_boundaries(EngineConfig& config) const {
  std::map<std::string, int32_t> units;
  for (const auto& unit : config.plan.units) {
    units.try_emplace(unit.name, static_cast<int32_t>(units.size()));
  }
  const auto add = [](std::vector<int32_t>& list, int32_t unit) {
    if (std::find(list.begin(), list.end(), unit) == list.end()) list.push_back(unit);
  };
  const auto& blocks = options_.blocks;
  config.boundaries.resize(1 + blocks.size());
  for (const auto& p : parameters_) {
    if (!p.dedicated) continue;
    const int32_t unit = units.at(config.plan.matrices[config.plan.find(p.name)].unit);
    add(config.order, unit);
    for (const auto& name : p.names) add(config.boundaries[1 + block_of(name, blocks)], unit);
  }
  std::reverse(config.order.begin(), config.order.end());
  config.encloses.push_back(!blocks.empty());
  for (const auto& outer : blocks) {
    config.encloses.push_back(std::any_of(blocks.begin(), blocks.end(), [&](const auto& inner) {
      return inner.starts_with(outer + ".");
    }));
  }
}

void DistributedMuon::make_replicas(const MakeGroup& make_group) {
  const at::Device device = parameters_.front().value.device();
  std::vector<ReplicatedParameter> replicated;
  for (const at::Tensor& p : symmetric_) replicated.push_back({p, p, nullptr});
  replicas_ = std::make_shared<Replicas>(
      std::move(replicated), make_transport(make_group, nullptr, Channel::control, "replicas"),
      make_lane("replicas", device), options_.bucket_bytes);
  std::vector<at::Tensor> values = buffers_;
  for (const auto& p : parameters_) values.push_back(p.value.detach());
  const auto before = fingerprints(values);
  replicas_->broadcast(values, "(setup)");
  if (before != fingerprints(values)) {
    TORCH_WARN("rank ", engine_->rank(), " came with other initial values than rank 0, whose they ",
               "are now. Seed all ranks alike, or ignore this.");
  }
}

void DistributedMuon::make_optimizers() {
  OptimizerConfig config{.adjust_lr = options_.adjust_lr,
                         .nesterov = options_.nesterov,
                         .nonfinite = options_.nonfinite,
                         .publish_async = options_.publish_async};
  config.newton_schulz.steps = options_.ns_steps;
  optimizer_ = std::make_unique<Optimizer>(
      engine_, config, std::vector<int32_t>(engine_->plan().matrices.size(), 0));
  adamw_ = std::make_unique<torch::optim::AdamW>(symmetric_);
}

}  // namespace dmuon

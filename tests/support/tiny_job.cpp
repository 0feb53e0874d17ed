#include "tests/support/tiny_job.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>

namespace dmuon::testing {
namespace {

constexpr double kLr = 0.05;
constexpr double kMomentum = 0.9;
constexpr double kDecay = 0.1;

// Uniform in [-1/2, 1/2), without structure: a matrix of it has full rank.
at::Tensor noise(int seed, int64_t numel) {
  const at::Tensor index = at::arange(numel, at::kDouble) + 1000 * seed;
  return (((index + 1) * 12.9898).sin() * 43758.5453).frac().remainder(1) - 0.5;
}

std::map<std::string, at::Tensor> initial_weights() {
  std::map<std::string, at::Tensor> weights;
  int seed = 1;
  for (const char* block : {"blocks.0", "blocks.1"}) {
    for (const auto& [name, rows, cols] : {std::tuple{"down", 4, 7}, std::tuple{"up", 7, 4}}) {
      weights[std::string(block) + "." + name] = noise(seed, rows * cols).view({rows, cols}) * 1.2;
      ++seed;
    }
  }
  return weights;
}

at::Tensor apply(const at::Tensor& up, const at::Tensor& down, const at::Tensor& h, int used) {
  const at::Tensor inner = h.matmul(up.t()).relu();
  return used == 2 ? inner.matmul(down.t()) : inner.slice(1, 0, 4);
}

OwnershipPlan tiny_plan(int ranks, bool pack) {
  std::vector<Matrix> matrices;
  for (const auto& [name, weight] : initial_weights()) {
    matrices.push_back({.name = name,
                        .unit = name.substr(0, 8),
                        .layer = name.substr(0, 8),
                        .rows = weight.size(0),
                        .cols = weight.size(1),
                        .state_bytes = 8 * weight.numel()});
  }
  return make_plan(std::move(matrices), {.shard = ranks}, {.pack = pack});
}

std::string name_of(int block, const char* weight) {
  return "blocks." + std::to_string(block) + "." + weight;
}

}  // namespace

TinyJob::TinyJob(SimWorld& world, int rank, const TinyOptions& options)
    : adapter(std::make_shared<TinyAdapter>()), ring(std::make_shared<FlightRing>()) {
  adapter->where = options.residency;
  adapter->size = world.size();
  adapter->dtype = options.compute_dtype;
  Channels channels{.materialise = world.transport(rank, "materialise", ring.get()),
                    .reduce = world.transport(rank, "reduce", ring.get()),
                    .control = world.transport(rank, "control", ring.get()),
                    .materialise_lane = make_host_lane("materialise"),
                    .reduce_lane = make_host_lane("reduce"),
                    .publish_lane = make_host_lane("publish"),
                    .tp_lane = make_host_lane("tp")};
  engine = std::make_shared<Engine>(EngineConfig{.plan = tiny_plan(world.size(), options.pack),
                                                 .boundaries = {{0}, {1}},
                                                 .encloses = {false, false},
                                                 .order = {1, 0},
                                                 .adapter = adapter,
                                                 .ring = ring,
                                                 .position = {.shard = rank}},
                                    std::move(channels));
  for (const auto& [name, weight] : initial_weights()) {
    parameters_[name] = weight.to(at::kFloat).set_requires_grad(true);
    engine->adopt(engine->plan().find(name), parameters_[name]);
  }
  optimizer = std::make_unique<Optimizer>(engine, OptimizerConfig{.nonfinite = options.nonfinite},
                                          std::vector<int32_t>(4, 0));
}

at::Tensor TinyJob::block(int index, const at::Tensor& h, int used) {
  engine->enter(index);
  const at::Tensor out =
      apply(parameter(name_of(index, "up")), parameter(name_of(index, "down")), h, used);
  engine->leave(index, {out});
  return out;
}

at::Tensor TinyJob::forward(const at::Tensor& x) { return block(1, block(0, x)); }

bool TinyJob::step() {
  return optimizer->step({{.lr = kLr, .weight_decay = kDecay, .momentum = kMomentum}}, {});
}

void TinyJob::zero_grad() {
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
}

std::map<std::string, at::Tensor> TinyJob::owned_weights() {
  std::map<std::string, at::Tensor> owned;
  for (size_t m = 0; m < engine->plan().matrices.size(); ++m) {
    const auto place = engine->place(static_cast<int>(m));
    const at::Tensor master = engine->store(place.unit).master(place.slot);
    if (master.defined()) owned[engine->plan().matrices[m].name] = master.clone();
  }
  return owned;
}

TinyReference::TinyReference(c10::ScalarType dtype) : parameters_(initial_weights()) {
  for (auto& [name, weight] : parameters_) weight = weight.to(dtype).set_requires_grad(true);
}

at::Tensor TinyReference::block(int index, const at::Tensor& h, int used) {
  return apply(parameters_.at(name_of(index, "up")), parameters_.at(name_of(index, "down")), h,
               used);
}

at::Tensor TinyReference::forward(const at::Tensor& x) { return block(1, block(0, x)); }

// The formulas of the design, written out.
void TinyReference::step() {
  at::NoGradGuard no_grad;
  for (auto& [name, weight] : parameters_) {
    const at::Tensor gradient = weight.grad();
    if (!gradient.defined()) continue;
    at::Tensor& buffer = momentum_[name];
    buffer = buffer.defined() ? buffer * kMomentum + gradient : gradient.clone();
    const at::Tensor u = gradient + kMomentum * buffer;
    const at::Tensor o =
        u.scalar_type() == at::kDouble ? newton_schulz_reference(u, {}) : newton_schulz(u, {});
    const double scale = adjusted_scale(AdjustLr::match_rms_adamw, weight.size(0), weight.size(1));
    weight.mul_(1 - kLr * kDecay).sub_(o, kLr * scale);
  }
}

void TinyReference::zero_grad() {
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
}

at::Tensor loss_of(const at::Tensor& output) { return output.pow(2).mean(); }

at::Tensor tiny_batch(int seed, int rows) {
  return noise(100 + seed, rows * 4).view({rows, 4}) * 4;
}

double relative_error(const std::map<std::string, at::Tensor>& got,
                      const std::map<std::string, at::Tensor>& truth) {
  double worst = 0;
  for (const auto& [name, weight] : truth) {
    const at::Tensor difference = got.at(name).detach().to(at::kDouble) - weight.detach();
    worst = std::max(worst, (difference.norm() / weight.detach().norm()).item<double>());
  }
  return worst;
}

Expected expected_of(int rows, const ReferenceScript& script) {
  TinyReference truth;
  script(truth, [&](int seed) { return tiny_batch(seed, rows); });
  Expected expected{truth.weights(), 5e-7};
  for (const bool reversed : {false, true}) {
    TinyReference plain(at::kFloat);
    script(plain, [&](int seed) {
      const at::Tensor x = tiny_batch(seed, rows).to(at::kFloat);
      return reversed ? x.flip(0) : x;
    });
    expected.tolerance =
        std::max(expected.tolerance, 2 * relative_error(plain.weights(), truth.weights()));
  }
  return expected;
}

at::Tensor share_of(const at::Tensor& batch, int rank, int size) {
  const int64_t rows = batch.size(0) / size;
  return batch.narrow(0, rank * rows, rows).to(at::kFloat);
}

}  // namespace dmuon::testing

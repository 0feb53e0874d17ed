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

// The second layer, or what stands in for it where it is not used.
template <class Linear>
at::Tensor block_of(const Linear& linear, const std::string& block, const at::Tensor& h, int used) {
  const at::Tensor inner = linear(block + ".up", h).relu();
  return used == 2 ? linear(block + ".down", inner) : inner.slice(1, 0, 4);
}

OwnershipPlan tiny_plan(const Mesh& mesh, const TinyOptions& options) {
  std::vector<Matrix> matrices;
  for (const auto& [name, weight] : initial_weights(options.inner)) {
    matrices.push_back({.name = name,
                        .unit = name.substr(0, 8),
                        .layer = name.substr(0, 8),
                        .rows = weight.size(0),
                        .cols = weight.size(1),
                        .state_bytes = 8 * weight.numel(),
                        .route = options.adamw.contains(name) ? Route::adamw : Route::muon});
  }
  return make_plan(std::move(matrices), mesh, {.pack = options.pack});
}

std::string name_of(int block) { return "blocks." + std::to_string(block); }

std::vector<TpLayout> layouts_of(const OwnershipPlan& plan, const Cuts& cuts) {
  std::vector<TpLayout> layouts(cuts.empty() ? 0 : plan.matrices.size());
  for (const auto& [name, layout] : cuts) layouts[plan.find(name)] = layout;
  return layouts;
}

}  // namespace

std::map<std::string, at::Tensor> initial_weights(int64_t inner) {
  std::map<std::string, at::Tensor> weights;
  int seed = 1;
  for (const char* block : {"blocks.0", "blocks.1"}) {
    for (const auto& [name, rows, cols] :
         {std::tuple{"down", int64_t{4}, inner}, std::tuple{"up", inner, int64_t{4}}}) {
      weights[std::string(block) + "." + name] = noise(seed, rows * cols).view({rows, cols}) * 1.2;
      ++seed;
    }
  }
  return weights;
}

TinyJob::TinyJob(SimWorld& world, int rank, const TinyOptions& options)
    : adapter(std::make_shared<TinyAdapter>()),
      ring(std::make_shared<FlightRing>()),
      grid_(options.mesh, world.size(), rank),
      cuts_(options.cuts),
      model_(world.transport(rank, {"model", grid_.tps()})) {
  adapter->where = options.residency;
  adapter->size = static_cast<double>(grid_.mesh().cells());
  adapter->dtype = options.compute_dtype;
  adapter->prefetch = options.prefetch;
  OwnershipPlan plan = tiny_plan(grid_.mesh(), options);
  std::vector<TpLayout> layouts = layouts_of(plan, cuts_);
  engine = std::make_shared<Engine>(EngineConfig{.plan = std::move(plan),
                                                 .boundaries = {{0}, {1}},
                                                 .encloses = {false, false},
                                                 .order = {1, 0},
                                                 .adapter = adapter,
                                                 .ring = ring,
                                                 .position = grid_.position(),
                                                 .layouts = std::move(layouts),
                                                 .share_gather_staging = options.share_staging,
                                                 .share_scatter_staging = options.share_staging},
                                    channels(world, rank, options.one_rank_axes));
  add_parameters(options);
  optimizer = std::make_unique<Optimizer>(engine,
                                          OptimizerConfig{.nonfinite = options.nonfinite,
                                                          .sharded_gram = options.sharded_gram,
                                                          .publish_async = options.publish_async},
                                          std::vector<int32_t>(4, 0));
}

Channels TinyJob::channels(SimWorld& world, int rank, bool one_rank_axes) const {
  const auto transport = [&](Channel channel, const std::vector<int>& peers, bool optional) {
    if (optional && peers.size() == 1 && !one_rank_axes) return std::unique_ptr<Transport>();
    return world.transport(rank, {to_string(channel), peers, channel}, ring.get());
  };
  return {.materialise = transport(Channel::materialise, grid_.shards(), false),
          .reduce = transport(Channel::reduce, grid_.shards(), false),
          .replicate_reduce = transport(Channel::replicate_reduce, grid_.replicas(), true),
          .publish = transport(Channel::publish, grid_.replicas(), true),
          .tp_gather = transport(Channel::tp_gather, grid_.tps(), true),
          .tp_scatter = transport(Channel::tp_scatter, grid_.tps(), true),
          .control = transport(Channel::control, {}, false),
          .materialise_lane = make_host_lane("materialise"),
          .reduce_lane = make_host_lane("reduce"),
          .publish_lane = make_host_lane("publish"),
          .tp_lane = make_host_lane("tp")};
}

void TinyJob::add_parameters(const TinyOptions& options) {
  for (const auto& [name, weight] : initial_weights(options.inner)) {
    const at::Tensor shard = shard_of(weight, layout(name), grid_.position().tp);
    parameters_[name] = shard.to(at::kFloat).set_requires_grad(!options.frozen.contains(name));
    engine->adopt(engine->plan().find(name), parameters_[name]);
  }
}

TpLayout TinyJob::layout(const std::string& name) const {
  const auto found = cuts_.find(name);
  return found == cuts_.end() ? TpLayout() : found->second;
}

at::Tensor TinyJob::block(int index, const at::Tensor& h, int used) {
  engine->enter(index);
  const auto linear = [&](const std::string& name, const at::Tensor& x) {
    return tp_linear(x, parameter(name), layout(name), *model_);
  };
  const at::Tensor out = block_of(linear, name_of(index), h, used);
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

std::map<std::string, at::Tensor> TinyJob::seen_weights() {
  at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> seen;
  for (int block = 0; block < 2; ++block) {
    engine->enter(block);
    for (const char* weight : {".up", ".down"}) {
      seen[name_of(block) + weight] = parameter(name_of(block) + weight).detach().clone();
    }
    engine->leave(block, {});
  }
  return seen;
}

TinyReference::TinyReference(c10::ScalarType dtype, int64_t inner, bool halves)
    : halves_(halves), parameters_(initial_weights(inner)) {
  for (auto& [name, weight] : parameters_) weight = weight.to(dtype).set_requires_grad(true);
}

at::Tensor TinyReference::block(int index, const at::Tensor& h, int used) {
  const auto linear = [&](const std::string& name, const at::Tensor& x) {
    const at::Tensor& weight = parameters_.at(name);
    if (!halves_) return x.matmul(weight.t());
    const int64_t half = x.size(1) / 2;
    return x.slice(1, 0, half).matmul(weight.slice(1, 0, half).t()) +
           x.slice(1, half).matmul(weight.slice(1, half).t());
  };
  return block_of(linear, name_of(index), h, used);
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

Expected expected_of(int rows, const ReferenceScript& script, int64_t inner) {
  TinyReference truth(at::kDouble, inner);
  script(truth, [&](int seed) { return tiny_batch(seed, rows); });
  Expected expected{truth.weights(), 5e-7};
  for (const auto& [reversed, halves] : {std::pair{false, false}, {true, false}, {false, true}}) {
    TinyReference plain(at::kFloat, inner, halves);
    script(plain, [&, reversed = reversed](int seed) {
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

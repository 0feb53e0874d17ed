// One rank's share of a tiny training job over SimWorld: real autograd, no runtime.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/optimizer.h"
#include "tests/support/sim_transport.h"
#include "tests/support/tiny_mesh.h"

namespace dmuon::testing {

struct TinyAdapter final : RuntimeAdapter {
  Residency residency(int) const override { return where; }
  bool synchronize(int) const override { return sync; }
  double divisor(int) const override { return size; }
  c10::ScalarType compute_dtype(int) const override { return dtype; }
  c10::ScalarType reduce_dtype(int) const override { return c10::ScalarType::Float; }

  bool prefetches() const override { return prefetch; }

  Residency where = Residency::transient;
  bool sync = true;
  bool prefetch = false;
  double size = 1;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

constexpr int64_t kInner = 7;

struct TinyOptions {
  Residency residency = Residency::transient;
  bool pack = true;
  c10::ScalarType compute_dtype = c10::ScalarType::Float;
  Nonfinite nonfinite = Nonfinite::raise;
  Mesh mesh{.shard = 0};
  Cuts cuts{};
  int64_t inner = kInner;
  std::set<std::string> frozen{};
  std::set<std::string> adamw{};  // on this route
  bool publish_async = true;
  bool share_staging = false;
  bool one_rank_axes = false;  // groups for axes of size 1, too
  ShardedGram sharded_gram = ShardedGram::never;
  bool prefetch = false;
};

// Two blocks, each h -> relu(h up^T) down^T with up [inner, 4] and down [4, inner]; the loss is the
// mean of squares. Every rank starts from the same weights. A batch is shared out over the cells.
class TinyJob {
 public:
  TinyJob(SimWorld& world, int rank, const TinyOptions& options = {});

  // One block, with its hooks. `used`: 1 leaves `down` without a gradient.
  at::Tensor block(int index, const at::Tensor& h, int used = 2);
  at::Tensor forward(const at::Tensor& x);
  bool step();
  void zero_grad();

  // Copies: the masters that lie here, and what a forward would see.
  std::map<std::string, at::Tensor> owned_weights();
  std::map<std::string, at::Tensor> seen_weights();
  at::Tensor parameter(const std::string& name) { return parameters_.at(name); }
  Slot& slot(const std::string& name) { return engine->slot(engine->plan().find(name)); }
  TpLayout layout(const std::string& name) const;
  const TinyGrid& grid() const { return grid_; }

  std::shared_ptr<TinyAdapter> adapter;
  std::shared_ptr<FlightRing> ring;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<Optimizer> optimizer;

 private:
  Channels channels(SimWorld& world, int rank, bool one_rank_axes) const;
  void add_parameters(const TinyOptions& options);

  const TinyGrid grid_;
  const Cuts cuts_;
  std::unique_ptr<Transport> model_;  // TP axis: activations
  std::map<std::string, at::Tensor> parameters_;
};

// The same job in one process, without an engine. In float64 it is the truth, and uses the plain
// Newton-Schulz reference; in float32 it is what rounding makes of it.
class TinyReference {
 public:
  // `halves`: each product is the sum of two, as tensor parallelism makes it.
  explicit TinyReference(c10::ScalarType dtype = c10::ScalarType::Double, int64_t inner = kInner,
                         bool halves = false);
  at::Tensor block(int index, const at::Tensor& h, int used = 2);
  at::Tensor forward(const at::Tensor& x);
  void step();
  void zero_grad();
  at::Tensor parameter(const std::string& name) { return parameters_.at(name); }
  const std::map<std::string, at::Tensor>& weights() const { return parameters_; }

 private:
  const bool halves_;
  std::map<std::string, at::Tensor> parameters_, momentum_;
};

at::Tensor loss_of(const at::Tensor& output);
// [rows, 4], float64, a function of seed alone.
at::Tensor tiny_batch(int seed, int rows);

// 5e-7 relative (the contract), or twice the error of one process in float32 where that is more: on
// the batch as it is, with its rows in reverse order, and with products in halves. Newton-Schulz
// amplifies rounding by up to its slope at zero, 800. `script` trains a reference; `x` gives it its
// batches.
using Batch = std::function<at::Tensor(int seed)>;
using ReferenceScript = std::function<void(TinyReference&, const Batch& x)>;
struct Expected {
  std::map<std::string, at::Tensor> weights;  // float64
  double tolerance = 0;
};
Expected expected_of(int rows, const ReferenceScript& script, int64_t inner = kInner);
double relative_error(const std::map<std::string, at::Tensor>& got,
                      const std::map<std::string, at::Tensor>& truth);

std::map<std::string, at::Tensor> initial_weights(int64_t inner = kInner);

// Rank's slice in float32.
at::Tensor share_of(const at::Tensor& batch, int rank, int size);

}  // namespace dmuon::testing

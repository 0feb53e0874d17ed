// One rank's share of a tiny training job over SimWorld: real autograd, no runtime.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/optimizer.h"
#include "tests/support/sim_transport.h"

namespace dmuon::testing {

struct TinyAdapter final : RuntimeAdapter {
  Residency residency(int) const override { return where; }
  bool synchronize(int) const override { return sync; }
  double divisor(int) const override { return size; }
  c10::ScalarType compute_dtype(int) const override { return dtype; }
  c10::ScalarType reduce_dtype(int) const override { return c10::ScalarType::Float; }

  Residency where = Residency::transient;
  bool sync = true;
  double size = 1;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

struct TinyOptions {
  Residency residency = Residency::transient;
  bool pack = true;
  c10::ScalarType compute_dtype = c10::ScalarType::Float;
  Nonfinite nonfinite = Nonfinite::raise;
};

// Two blocks, each h -> relu(h up^T) down^T with up [7, 4] and down [4, 7]; the loss is the mean of
// squares. Every rank starts from the same weights.
class TinyJob {
 public:
  TinyJob(SimWorld& world, int rank, const TinyOptions& options = {});

  // One block, with its hooks. `used`: 1 leaves `down` without a gradient.
  at::Tensor block(int index, const at::Tensor& h, int used = 2);
  at::Tensor forward(const at::Tensor& x);
  bool step();
  void zero_grad();

  std::map<std::string, at::Tensor> owned_weights();  // copies
  at::Tensor parameter(const std::string& name) { return parameters_.at(name); }

  std::shared_ptr<TinyAdapter> adapter;
  std::shared_ptr<FlightRing> ring;
  std::shared_ptr<Engine> engine;
  std::unique_ptr<Optimizer> optimizer;

 private:
  std::map<std::string, at::Tensor> parameters_;
};

// The same job in one process and float64, without an engine.
class TinyReference {
 public:
  TinyReference();
  at::Tensor block(int index, const at::Tensor& h, int used = 2);
  at::Tensor forward(const at::Tensor& x);
  void step();
  void zero_grad();
  const std::map<std::string, at::Tensor>& weights() const { return parameters_; }

 private:
  std::map<std::string, at::Tensor> parameters_, momentum_;
};

at::Tensor loss_of(const at::Tensor& output);
// [rows, 4], float64, a function of seed alone.
at::Tensor tiny_batch(int seed, int rows);
// Rank's slice in float32.
at::Tensor share_of(const at::Tensor& batch, int rank, int size);

}  // namespace dmuon::testing

// A small LibTorch model, and the same training in one process without an engine.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <map>
#include <string>

#include "adapters/ddp/distributed_muon.h"

namespace dmuon::testing {

using Weights = std::map<std::string, at::Tensor>;

// first, four blocks h + tanh(h W^T + b), last; block 3 is never called. `scale` is a buffer.
class TinyNet : public torch::nn::Module {
 public:
  static constexpr int64_t kIn = 6, kWidth = 8, kOut = 3;
  using Enter = std::function<at::Tensor(int block, const std::function<at::Tensor()>& call)>;

  explicit TinyNet(uint64_t seed);
  at::Tensor forward(const at::Tensor& x, const Enter& enter);

  torch::nn::Linear first, last;
  torch::nn::ModuleList blocks;
  at::Tensor scale;
};

inline const std::string kUnused = "blocks.3.weight";
constexpr int kRows = 24;  // divisible by 1, 2, 3 and 4

// In float64, a function of seed alone.
at::Tensor batch(int seed);
at::Tensor loss_of(const at::Tensor& output);
Weights weights_of(const torch::nn::Module& net);  // copies

// What a script may do, whoever trains.
class Job {
 public:
  virtual ~Job() = default;
  virtual void backward(int seed) = 0;
  virtual void accumulate(int seed) = 0;  // the same, to be reduced later
  virtual void zero_grad() = 0;
  virtual double clip(double max_norm) = 0;
  virtual void step() = 0;
  virtual void set_lr(double lr, double adamw_lr) = 0;
};
using Script = std::function<void(Job&)>;

extern const MuonOptions kOptions;

// One process, from TinyNet(1): in float64 with the plain Newton-Schulz, and in float32, which says
// what rounding makes of it. The tolerance is 5e-7 relative (the contract), or twice the error of
// float32 where that is more: on the batch as it is, reversed, and in parts whose gradients are
// added. Newton-Schulz amplifies rounding by up to its slope at zero, 800.
struct Expected {
  Weights weights;
  double tolerance = 0;
};
Expected expected_of(const Script& script);

// Of the tensor that is farthest off.
double relative_error(const Weights& got, const Weights& truth);

}  // namespace dmuon::testing

#include "tests/ddp/tiny_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>

#include "kernels/momentum.h"
#include "kernels/newton_schulz.h"

namespace dmuon::testing {
namespace {

// Numbers without structure, the same on every machine.
at::Tensor scrambled(at::IntArrayRef sizes, double seed) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  const at::Tensor x = at::arange(numel, at::kDouble) * 12.9898 + seed * 78.233;
  return (x.sin() * 437.5453).sin().view(sizes);
}

bool is_muon(const std::string& name, const at::Tensor& parameter) {
  return name.starts_with("blocks.") && parameter.dim() == 2;
}

struct Variant {
  at::ScalarType dtype = at::kDouble;
  int parts = 1;
  bool reversed = false;
};

class OneProcess final : public Job {
 public:
  explicit OneProcess(const Variant& variant) : variant_(variant), net(1) {
    net.to(variant.dtype);
    for (const auto& p : net.named_parameters()) {
      if (!is_muon(p.key(), p.value())) others_.push_back(p.value());
    }
    adamw_ = std::make_unique<torch::optim::AdamW>(others_);
  }

  void backward(int seed) override {
    at::Tensor x = batch(seed).to(variant_.dtype);
    if (variant_.reversed) x = x.flip(0);
    for (const at::Tensor& part : x.chunk(variant_.parts)) {
      const auto output = net.forward(part, [](int, const auto& f) { return f(); });
      (loss_of(output) / variant_.parts).backward();
    }
  }
  void accumulate(int seed) override { backward(seed); }
  void zero_grad() override { net.zero_grad(); }
  double clip(double max_norm) override {
    return torch::nn::utils::clip_grad_norm_(net.parameters(), max_norm);
  }
  void set_lr(double lr, double adamw_lr) override {
    options_.lr = lr;
    options_.adamw_lr = adamw_lr;
  }

  void step() override {
    const at::NoGradGuard no_grad;
    for (const auto& p : net.named_parameters()) {
      if (is_muon(p.key(), p.value()) && p.value().grad().defined()) muon(p.key(), p.value());
    }
    auto& group = static_cast<torch::optim::AdamWOptions&>(adamw_->param_groups()[0].options());
    group.lr(options_.adamw_lr).weight_decay(options_.adamw_weight_decay);
    adamw_->step();
  }

 private:
  void muon(const std::string& name, at::Tensor weight) {
    at::Tensor& buffer = momentum_[name];
    if (!buffer.defined()) buffer = at::zeros_like(weight);
    buffer.mul_(options_.momentum).add_(weight.grad());
    const at::Tensor o =
        newton_schulz_reference(weight.grad() + options_.momentum * buffer, NewtonSchulz{});
    const double scale = adjusted_scale(options_.adjust_lr, weight.size(0), weight.size(1));
    weight.mul_(1 - options_.lr * options_.weight_decay).sub_(o, options_.lr * scale);
  }

  const Variant variant_;
  MuonOptions options_ = kOptions;
  Weights momentum_;
  std::vector<at::Tensor> others_;
  std::unique_ptr<torch::optim::AdamW> adamw_;

 public:
  TinyNet net;
};

Weights trained(const Variant& variant, const Script& script) {
  OneProcess job(variant);
  script(job);
  return weights_of(job.net);
}

}  // namespace

const MuonOptions kOptions{.lr = 0.02, .weight_decay = 0.1, .adamw_lr = 3e-3};

TinyNet::TinyNet(uint64_t seed) : first(kIn, kWidth), last(kWidth, kOut) {
  register_module("first", first);
  for (int i = 0; i < 4; ++i) blocks->push_back(torch::nn::Linear(kWidth, kWidth));
  register_module("blocks", blocks);
  register_module("last", last);
  scale = register_buffer("scale", at::ones({}));
  const at::NoGradGuard no_grad;
  double at = static_cast<double>(seed);
  for (at::Tensor& parameter : parameters()) {
    parameter.copy_(scrambled(parameter.sizes(), at += 0.37) / 2);
  }
}

at::Tensor TinyNet::forward(const at::Tensor& x, const Enter& enter) {
  at::Tensor h = first(x) * scale;
  for (int i = 0; i < 3; ++i) {
    h = enter(i, [&] { return h + (*blocks)[i]->as<torch::nn::Linear>()->forward(h).tanh(); });
  }
  return last(h);
}

at::Tensor batch(int seed) { return scrambled({kRows, TinyNet::kIn}, 100 + seed); }

at::Tensor loss_of(const at::Tensor& output) { return output.square().mean(); }

Weights weights_of(const torch::nn::Module& net) {
  Weights weights;
  for (const auto& p : net.named_parameters()) weights[p.key()] = p.value().detach().clone();
  return weights;
}

double relative_error(const Weights& got, const Weights& truth) {
  double worst = 0;
  for (const auto& [name, value] : truth) {
    const double error = (got.at(name).to(at::kDouble) - value).norm().item<double>();
    worst = std::max(worst, error / value.norm().item<double>());
  }
  return worst;
}

Expected expected_of(const Script& script) {
  Expected expected{trained({}, script), 5e-7};
  for (const Variant& variant : {Variant{at::kFloat},
                                 {at::kFloat, 1, true},
                                 {at::kFloat, 2},
                                 {at::kFloat, 3},
                                 {at::kFloat, 4}}) {
    expected.tolerance = std::max(expected.tolerance,
                                  2 * relative_error(trained(variant, script), expected.weights));
  }
  return expected;
}

}  // namespace dmuon::testing

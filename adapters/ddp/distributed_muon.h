// Muon with one owner rank per matrix for a LibTorch program: trains a torch::nn::Module that is
// whole on every rank, without Python.
//
//   dmuon::DistributedMuon trainer(model, dmuon::split_of(group), is_hidden_matrix, {.lr = 0.02});
//   for (...) {
//     trainer.zero_grad();
//     loss_of(trainer.forward([&] { return model->forward(x); }), y).backward();
//     trainer.clip_grad_norm(1.0);
//     trainer.step();
//   }
//
// Collective: every rank makes the same calls in the same order, from the thread that trains. A
// failure of settings or data is the same exception on all of them, before anything has changed.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adapters/ddp/ddp_adapter.h"
#include "adapters/ddp/ddp_groups.h"
#include "adapters/ddp/ddp_selection.h"
#include "adapters/ddp/replicas.h"
#include "engine/engine.h"
#include "engine/optimizer.h"

namespace torch::optim {
class AdamW;
}

namespace dmuon {

// As the keywords of dmuon.Muon. The rates and factors are read anew at each step.
struct MuonOptions {
  double lr = 0.02;
  double momentum = 0.95;
  double weight_decay = 0;
  double adamw_lr = 1e-3;
  double adamw_beta1 = 0.9;
  double adamw_beta2 = 0.999;
  double adamw_eps = 1e-8;
  double adamw_weight_decay = 0.01;

  // Constant.
  int ns_steps = 5;
  bool nesterov = true;
  AdjustLr adjust_lr = AdjustLr::match_rms_adamw;
  Nonfinite nonfinite = Nonfinite::raise;
  bool publish_async = true;  // beside the next forward; else step() waits
  // Modules that report their own calls by forward(path, f), so that the forward waits for the
  // weights of one after the other; everything else is whole when forward(f) begins.
  std::vector<std::string> blocks{};
  int64_t bucket_bytes = 25 << 20;  // of other gradients that travel together
  bool broadcast_buffers = true;    // rank 0's, before each forward in training mode
};

// Throws ConfigError, naming the option.
void check_options(const MuonOptions& options);

class DistributedMuon {
 public:
  // The ranks begin with rank 0's parameters and buffers; a rank that had others is warned once.
  // Parameters must stay the tensors they are: convert and move the model before.
  DistributedMuon(std::shared_ptr<torch::nn::Module> model, const MakeGroup& make_group,
                  const Select& select, MuonOptions options = {});
  ~DistributedMuon();

  // Runs `f`, a call of the model (of one of `blocks`, inside a call of the model), and returns
  // what it returns: a tensor, a vector or a tuple of tensors. Every use of the weights that is to
  // be trained goes through here.
  template <class F>
  auto forward(F&& f) {
    begin_forward();
    return call(0, std::forward<F>(f));
  }
  template <class F>
  auto forward(const std::string& block, F&& f) {
    return call(boundary(block), std::forward<F>(f));
  }

  // Updates the matrices by Muon, on their owners, and all others by AdamW. Returns whether it did:
  // false where no rank has a gradient, or a non-finite one was skipped.
  bool step();
  void zero_grad();
  // Scales all gradients by max_norm / norm where the norm is larger. Returns the norm before.
  // Throws ConfigError where either is negative or NaN.
  double clip_grad_norm(double max_norm, double p = 2);

  // While it lives backward passes accumulate; the first one after it reduces the sum. Nests.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(DistributedMuon& trainer);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DistributedMuon& trainer_;
  };
  NoSync no_sync() { return NoSync(*this); }

  // Weights, buffers, momentum and AdamW's state, by name: rank 0 writes and reads, any number of
  // ranks may load. torch.load(weights_only=False) reads the file too. Rates and gradients are not
  // in it.
  void save(const std::string& path);
  void load(const std::string& path);

  // Waits until the parameters show the values of the last step.
  void wait();

  MuonOptions& options() { return options_; }
  const Engine& engine() const { return *engine_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  std::map<std::string, int> owners() const;                   // of each matrix, a rank
  int64_t ns_calls() const { return optimizer_->ns_calls(); }  // of this rank

 private:
  struct Saved;  // a tensor of the state

  template <class F>
  auto call(int boundary, F&& f) {
    entered_[boundary] = true;
    Call running(*engine_, boundary);
    auto outputs = f();
    running.leave(tensors_of(outputs));
    return outputs;
  }
  // Leaves the boundary where `f` throws, too.
  class Call {
   public:
    Call(Engine& engine, int boundary);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    void leave(const std::vector<at::Tensor>& outputs);

   private:
    Engine& engine_;
    const int boundary_;
    bool left_ = false;
  };
  static std::vector<at::Tensor> tensors_of(const at::Tensor& t) { return {t}; }
  static std::vector<at::Tensor> tensors_of(const std::vector<at::Tensor>& t) { return t; }
  template <class... T>
  static std::vector<at::Tensor> tensors_of(const std::tuple<T...>& t) {
    return std::apply([](const auto&... each) { return std::vector<at::Tensor>{each...}; }, t);
  }

  OwnershipPlan make_plan_of(const Select& select, int64_t ranks);
  std::vector<std::string> proposal(const OwnershipPlan& plan) const;
  void read_parameters();
  void make_engine(OwnershipPlan plan, std::unique_ptr<Transport> control,
                   const MakeGroup& make_group);
  Channels channels(std::unique_ptr<Transport> control, const MakeGroup& make_group) const;
  void set_boundaries(EngineConfig& config) const;
  void make_replicas(const MakeGroup& make_group);
  void make_optimizers();
  void begin_forward();
  int boundary(const std::string& block) const;
  std::string problem() const;  // of this rank with the step
  void set_adamw_options();
  void read_gradients();
  std::vector<Saved> state();
  void add_owned(const ModelParameter& parameter, std::vector<Saved>& all);

  const std::shared_ptr<torch::nn::Module> model_;
  MuonOptions options_;
  std::vector<ModelParameter> parameters_;
  std::vector<at::Tensor> symmetric_, buffers_;
  std::shared_ptr<FlightRing> ring_;
  std::shared_ptr<DdpAdapter> adapter_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Replicas> replicas_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<torch::optim::AdamW> adamw_;
  SymmetricGradients gradients_;
  std::vector<bool> entered_;  // per boundary, ever
  int no_sync_depth_ = 0;
};

}  // namespace dmuon

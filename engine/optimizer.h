// Muon over the matrices that this rank owns: momentum, Newton-Schulz, update, publish.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/agreement.h"
#include "engine/engine.h"
#include "engine/sharded_newton_schulz.h"
#include "kernels/cpu/workspace.h"
#include "kernels/momentum.h"
#include "kernels/newton_schulz.h"

namespace dmuon {

// One parameter group, read anew at each step. Muon reads `momentum`, AdamW `beta1`, `beta2`,
// `eps`.
struct GroupSettings {
  double lr = 0.02;
  double weight_decay = 0;
  double momentum = 0.95;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
};

enum class Nonfinite { raise, skip, propagate };

struct OptimizerConfig {
  NewtonSchulz newton_schulz;
  AdjustLr adjust_lr = AdjustLr::match_rms_adamw;
  bool nesterov = true;
  Nonfinite nonfinite = Nonfinite::raise;
  ShardedGram sharded_gram = ShardedGram::never;
  bool publish_async = true;  // false: step() returns when every update has been published
};

// The gradients that the runtime keeps, on this rank: only read, to look for what is not finite.
struct SymmetricGradients {
  std::vector<at::Tensor> tensors;
  std::vector<int32_t> indices;    // parallel: which entry of `names` each belongs to
  std::vector<std::string> names;  // of all symmetric parameters, the same on every rank
};

class Optimizer {
 public:
  // The state of every owned matrix is allocated here. groups[m]: the group of matrix m.
  Optimizer(std::shared_ptr<Engine> engine, OptimizerConfig config, std::vector<int32_t> groups);

  // Collective. Waits for reductions, agrees with all ranks, then updates and publishes; what is
  // frozen by now keeps its weight, since no other rank knows whether it has a gradient. Returns
  // whether the rest of the step is to go on: false where no rank has a gradient, or where a
  // non-finite one is skipped; then nothing has changed. Throws the same error on every rank, and
  // changes nothing, where a gradient is not finite (Nonfinite::raise), ranks ran different passes
  // or have different settings, an accumulation under no_sync was never reduced, or a rank gives an
  // `error` of its own.
  bool step(const std::vector<GroupSettings>& groups, const SymmetricGradients& symmetric,
            const std::string& error = "");

  // By torch's names: "momentum_buffer", or "exp_avg", "exp_avg_sq" and "step" on the adamw route.
  // float32. The momentum is whole, on the TP owner; the others have this rank's sizes, but for
  // "step", and lie where the weight's master does. Empty on other ranks. Writing them is legal.
  const std::map<std::string, at::Tensor>& state(int matrix) const { return state_[matrix]; }

  void set_groups(std::vector<int32_t> groups) { groups_ = std::move(groups); }
  int64_t ns_calls() const { return ns_calls_; }
  int64_t ns_calls_last_step() const { return ns_calls_last_step_; }
  const std::vector<int64_t>& ns_calls_per_matrix() const { return ns_per_matrix_; }
  // Of host memory that Newton-Schulz keeps, its input included. Stays the same from the second
  // step on.
  int64_t ns_workspace_bytes() const;
  const OptimizerConfig& config() const { return config_; }
  const std::vector<int32_t>& in_shards() const { return in_shards_; }

 private:
  StepWord word(const std::vector<GroupSettings>& groups, const SymmetricGradients& symmetric);
  StepVerdict agreed(const StepWord& mine);
  void raise_everywhere(std::string error);
  int64_t find_nonfinite(const SymmetricGradients& symmetric) const;
  void check(const StepVerdict& verdict, const SymmetricGradients& symmetric) const;
  bool has_in_shards(int unit) const;  // any matrix of it, on any rank
  bool owns_any(int unit) const;
  std::function<void()> update_unit(int unit, const std::vector<GroupSettings>& groups);
  // A matrix between its momentum and its update: in place, from u to the orthogonalised u.
  struct Pending {
    int matrix;
    at::Tensor u;
    const GroupSettings& group;
  };
  void orthogonalise(const std::vector<Pending>& list);
  void finish_locally(std::vector<Pending>& list);
  at::Tensor orthogonalised(int matrix, const at::Tensor& gradient, const GroupSettings& group);
  static void apply(Engine& engine, AdjustLr adjust, int matrix, const at::Tensor& orthogonal,
                    const GroupSettings& group);
  void update_locally(int unit, const std::vector<GroupSettings>& groups);
  std::function<void()> scatter(int unit, const std::vector<GroupSettings>& groups);
  void wait_for(ShardedNewtonSchulz& sharded);
  void start_in_shards(const std::vector<GroupSettings>& groups);
  void finish_in_shards(const std::vector<GroupSettings>& groups);
  at::Tensor with_momentum(int matrix, const at::Tensor& gradient, const GroupSettings& group,
                           int64_t offset = 0);
  void update_all(const std::vector<GroupSettings>& groups);
  void allocate_state(int matrix);
  void update_adamw(int matrix, const at::Tensor& gradient, const GroupSettings& group);

  std::shared_ptr<Engine> engine_;
  OptimizerConfig config_;
  std::vector<int32_t> groups_;
  std::vector<std::map<std::string, at::Tensor>> state_;
  at::Tensor scratch_;  // Newton-Schulz input: of one matrix, with several threads of a unit's
  NsWorkspace workspace_;
  std::vector<int32_t> in_shards_;
  // Of this step: the units with matrices in shards, as `order` has them.
  std::vector<std::pair<int, std::unique_ptr<ShardedNewtonSchulz>>> sharded_units_;
  std::shared_ptr<void> exchanging_;  // theirs, for the clock
  std::vector<int64_t> ns_per_matrix_;
  int64_t ns_calls_ = 0;
  int64_t ns_calls_last_step_ = 0;
};

}  // namespace dmuon

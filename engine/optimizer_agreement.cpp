// What the ranks agree on before a step: the first half of Optimizer::step.
#include <algorithm>
#include <utility>

#include "engine/digest.h"
#include "engine/error.h"
#include "engine/gradients.h"
#include "engine/optimizer.h"
#include "kernels/sum_pieces.h"

namespace dmuon {
namespace {

int64_t settings_hash(const std::vector<GroupSettings>& groups) {
  Hasher hasher;
  for (const auto& g : groups) {
    for (const double value : {g.lr, g.weight_decay, g.momentum, g.beta1, g.beta2, g.eps}) {
      hasher.add(value);
    }
  }
  return static_cast<int64_t>(hasher.digest().words[0]);
}

}  // namespace

StepWord Optimizer::word(const std::vector<GroupSettings>& groups,
                         const SymmetricGradients& symmetric) {
  StepWord word{.any_gradient = !symmetric.tensors.empty(),
                .sequence = engine_->take_sequence_hash(),
                .settings = settings_hash(groups) ^ engine_->take_clipping_hash(),
                .failed = engine_->has_local_gradients(),
                .gather_again = !engine_->gathers_are_current()};
  for (size_t m = 0; m < state_.size(); ++m) {
    word.any_gradient |= owned_gradient(*engine_, static_cast<int>(m)).defined();
  }
  if (config_.nonfinite != Nonfinite::propagate) word.nonfinite = find_nonfinite(symmetric);
  return word;
}

// 1 + index: matrices first, then symmetric parameters.
int64_t Optimizer::find_nonfinite(const SymmetricGradients& symmetric) const {
  for (size_t m = 0; m < state_.size(); ++m) {
    const at::Tensor gradient = owned_gradient(*engine_, static_cast<int>(m));
    if (gradient.defined() && !all_finite(gradient)) return static_cast<int64_t>(m) + 1;
  }
  for (size_t i = 0; i < symmetric.tensors.size(); ++i) {
    if (!all_finite(symmetric.tensors[i])) {
      return static_cast<int64_t>(state_.size() + symmetric.indices[i]) + 1;
    }
  }
  return 0;
}

void Optimizer::raise_everywhere(std::string error) {
  if (error.empty() && engine_->has_local_gradients()) {
    error =
        "step() after backward passes under no_sync whose gradients were never reduced. Run the "
        "last micro-batch's backward outside of no_sync, or call zero_grad() to drop them.";
  }
  agree(engine_->control(), {.error = std::move(error)});
}

void Optimizer::check(const StepVerdict& verdict, const SymmetricGradients& symmetric) const {
  if (verdict.sequence_differs) {
    throw RuntimeFailure(
        "the ranks ran different forward or backward passes since the last step; their weights may "
        "already differ. Every rank must call the same modules in the same order.");
  }
  if (verdict.settings_differ) {
    throw ConfigError(
        "the ranks have different learning rates or other settings (lr, momentum, weight_decay, "
        "betas, eps) in param_groups, or clipped by other norms (max_norm, norm_type). Set them "
        "alike on every rank.");
  }
  if (!verdict.nonfinite || config_.nonfinite != Nonfinite::raise) return;
  const size_t index = static_cast<size_t>(verdict.nonfinite - 1);
  const auto& matrices = engine_->plan().matrices;
  const std::string name =
      index < matrices.size() ? matrices[index].name : symmetric.names[index - matrices.size()];
  throw RuntimeFailure(
      message("the gradient of '", name,
              "' is not finite. Nothing was updated. Lower the learning rate or clip, "
              "or choose nonfinite=\"skip\" or \"propagate\"."));
}

}  // namespace dmuon

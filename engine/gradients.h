// Gradients as clipping and checking see them: each element of the model once in the whole job.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/engine.h"

namespace dmuon {

// This rank's part of some gradients.
struct GradientSet {
  std::vector<int32_t> matrices;    // dedicated: the owner's reduced gradient counts
  std::vector<at::Tensor> counted;  // of this rank; over all ranks each element is there once
  std::vector<at::Tensor> copies;   // what another rank counts
};

// Collective. The p-norm of all elements (p = inf: the largest magnitude; p = 0: how many are not
// zero), accumulated in float64, the same on every rank. Throws ConfigError, the same on every
// rank, unless p >= 0 on all.
double gradient_norm(Engine& engine, const GradientSet& set, double p);

// Collective. Multiplies them all by max_norm / (norm + 1e-6) where that is below 1, as torch does;
// returns the norm before. Throws ConfigError, the same on every rank, unless p >= 0 and max_norm
// >= 0 on all; with `error_if_nonfinite` RuntimeFailure where the norm is not finite. Nothing is
// changed then. That the ranks give the same numbers is compared with the next step's settings.
double clip_gradients(Engine& engine, const GradientSet& set, double max_norm, double p,
                      bool error_if_nonfinite);

// Multiplies them all, in place.
void scale_gradients(Engine& engine, const GradientSet& set, double factor);

// The reduced gradient of a matrix on its owner, this rank's shard of it where it is cut; undefined
// where there is none.
at::Tensor owned_gradient(Engine& engine, int matrix);
// The whole of it, on the rank that runs Newton-Schulz.
at::Tensor whole_gradient(Engine& engine, int matrix);

}  // namespace dmuon

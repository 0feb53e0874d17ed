// Newton-Schulz of one matrix in the caller's memory.
#pragma once
#include <vector>

#include "kernels/cpu/panels.h"
#include "kernels/cpu/recipe.h"
#include "kernels/cpu/workspace.h"

namespace dmuon::cpu {

// Threads that work together, each with its arena.
struct Team {
  std::vector<Arena>& arenas;  // [first, first + count) are the team's
  int first = 0;
  int count = 1;
};

// Floats that the first arena of a team must have, and each of the others.
struct Demand {
  int64_t first = 0, others = 0;
};
Demand demand(const TileKernels& kernels, const Recipe& recipe, const View& in, const View& out);

// out = Newton-Schulz of in, both of the same sizes and oriented alike, not empty, maybe the same
// memory. The Frobenius norm of `in` is one over `inverse_norm`, finite and not 0. The arenas have
// been reserved.
void orthogonalise(const TileKernels& kernels, const Recipe& recipe, const View& in,
                   const View& out, float inverse_norm, const Team& team);

}  // namespace dmuon::cpu

// Ranks compare what they are about to do, before anything moves. All functions are collective over
// `transport`, and on a difference throw the same ConfigError on every rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/transport.h"

namespace dmuon {

// What one rank wants to dedicate: one line per parameter, "name\tdetail", sorted by name; `detail`
// is shape, dtype and whatever else must be equal. `error`: what went wrong on this rank already.
struct Proposal {
  std::vector<std::string> lines;
  std::string error;
};

// One fixed-size collective where all agree; texts are exchanged only where they do not.
void agree(Transport& transport, const Proposal& mine);

// Rank 0's list, on every rank.
std::vector<int32_t> from_rank_0(Transport& transport, std::vector<int32_t> values);

// One word per step, combined by maximum over all ranks.
struct StepWord {
  bool any_gradient = false;
  int64_t nonfinite = 0;  // 0, or 1 + the index of a parameter with a non-finite gradient
  int64_t sequence = 0;   // hash of the collectives since the last step
  int64_t settings = 0;   // hash of what the step will do: learning rates and the like
  bool failed = false;    // this rank cannot step
};

struct StepVerdict {
  bool any_gradient = false;
  int64_t nonfinite = 0;
  bool sequence_differs = false;
  bool settings_differ = false;
  bool failed = false;
};

StepVerdict agree_on_step(Transport& transport, const StepWord& mine);

}  // namespace dmuon

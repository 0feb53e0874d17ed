// Ranks compare what they are about to do, before anything moves. All functions are collective over
// `transport`, and on a difference throw the same ConfigError on every rank.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/transport.h"

namespace dmuon {

// What one rank is about to do: one line per parameter or setting, "name\tdetail"; `detail` is
// shape, dtype and whatever else must be equal. `error`: what went wrong on this rank already.
// `subject` and `advice` begin and end the message: "the ranks do not <subject>: ... <advice>".
struct Proposal {
  std::vector<std::string> lines;
  std::string error;
  std::string subject = "agree";
  std::string advice;
};

// One fixed-size collective where all agree; texts are exchanged only where they do not.
void agree(Transport& transport, const Proposal& mine);

// Rank 0's list, on every rank.
std::vector<int32_t> from_rank_0(Transport& transport, std::vector<int32_t> values);

// One word per step, combined by maximum over all ranks.
struct StepWord {
  bool any_gradient = false;
  int64_t nonfinite = 0;      // 0, or 1 + the index of a parameter with a non-finite gradient
  int64_t sequence = 0;       // hash of the collectives since the last step
  int64_t settings = 0;       // hash of what the step will do: learning rates and the like
  bool failed = false;        // this rank cannot step
  bool gather_again = false;  // gradients have changed since they were gathered
};

struct StepVerdict {
  bool any_gradient = false;
  int64_t nonfinite = 0;
  bool sequence_differs = false;
  bool settings_differ = false;
  bool failed = false;
  bool gather_again = false;
};

StepVerdict agree_on_step(Transport& transport, const StepWord& mine);

}  // namespace dmuon

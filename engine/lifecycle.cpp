#include "engine/lifecycle.h"

#include <array>
#include <optional>

#include "engine/error.h"

namespace dmuon {
namespace {

using S = UnitState;
constexpr int kStates = 7;
constexpr int kCalls = 9;
using Next = std::optional<UnitState>;
constexpr Next no = std::nullopt;

// Rows: calls. Columns: idle, forward, backward, reduced, stepping, publishing, failed.
constexpr std::array<std::array<Next, kStates>, kCalls> kTable{{
    // enter: a forward begins; in `backward` it is the recomputation of a checkpoint
    {{S::forward, S::forward, S::backward, S::forward, no, S::forward, no}},
    // leave
    {{S::idle, S::forward, S::backward, S::reduced, no, no, no}},
    // pre_backward: from `idle` where a step came between forward and backward; the engine compares
    // the weights' epoch and refuses where they changed
    {{S::backward, S::backward, S::backward, S::backward, no, no, no}},
    // reduce: from `idle` and `forward` where this rank did not use the unit and others may have
    {{S::reduced, S::reduced, S::reduced, S::reduced, no, no, no}},
    // step
    {{S::stepping, S::stepping, no, S::stepping, no, S::stepping, no}},
    // publish
    {{no, no, no, no, S::publishing, no, no}},
    // finish
    {{S::idle, no, no, no, S::idle, S::idle, no}},
    // reset
    {{S::idle, S::idle, S::idle, S::idle, S::idle, S::idle, S::idle}},
    // fail
    {{S::failed, S::failed, S::failed, S::failed, S::failed, S::failed, S::failed}},
}};

std::string legal_states(UnitCall call) {
  std::string names;
  for (int i = 0; i < kStates; ++i) {
    if (!kTable[static_cast<int>(call)][i]) continue;
    names += names.empty() ? "" : ", ";
    names += to_string(static_cast<UnitState>(i));
  }
  return names;
}

}  // namespace

const char* to_string(UnitState state) {
  constexpr std::array names{"idle",     "forward",    "backward", "reduced",
                             "stepping", "publishing", "failed"};
  return names[static_cast<int>(state)];
}

const char* to_string(UnitCall call) {
  constexpr std::array names{"enter",   "leave",  "pre_backward", "reduce", "step",
                             "publish", "finish", "reset",        "fail"};
  return names[static_cast<int>(call)];
}

UnitState next_state(UnitState state, UnitCall call, const std::string& unit) {
  const Next next = kTable[static_cast<int>(call)][static_cast<int>(state)];
  if (!next) {
    throw ConfigError(message("unit '", unit, "': '", to_string(call), "' is not legal in state '",
                              to_string(state), "'; it is in: ", legal_states(call), "."));
  }
  return *next;
}

}  // namespace dmuon

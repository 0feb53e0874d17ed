// The life of a unit, as a table of legal calls. Pure.
#pragma once
#include <string>

namespace dmuon {

// idle: no forward since the last step. forward: at least one forward ran. backward: a backward
// pass has reached the unit. reduced: its gradient has been sent to the owners (or kept, under
// no_sync). stepping, publishing: inside the optimizer's step. failed: an operation of the unit
// threw half-way; only `reset` leaves it.
enum class UnitState { idle, forward, backward, reduced, stepping, publishing, failed };

enum class UnitCall { enter, leave, pre_backward, reduce, step, publish, finish, reset, fail };

const char* to_string(UnitState state);
const char* to_string(UnitCall call);

// The state after a legal call. Throws ConfigError, naming the unit, the state and the states in
// which the call is legal.
UnitState next_state(UnitState state, UnitCall call, const std::string& unit);

}  // namespace dmuon

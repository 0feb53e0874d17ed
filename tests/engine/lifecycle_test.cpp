#include "engine/lifecycle.h"

#include <gmock/gmock.h>

#include "engine/error.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

UnitState after(std::initializer_list<UnitCall> calls) {
  UnitState state = UnitState::idle;
  for (const UnitCall call : calls) state = next_state(state, call, "blocks.0");
  return state;
}

TEST(Lifecycle, GoesRoundInOneStep) {
  using enum UnitCall;
  EXPECT_EQ(after({enter, leave}), UnitState::forward);
  EXPECT_EQ(after({enter, leave, pre_backward}), UnitState::backward);
  EXPECT_EQ(after({enter, leave, pre_backward, reduce}), UnitState::reduced);
  EXPECT_EQ(after({enter, leave, pre_backward, reduce, step}), UnitState::stepping);
  EXPECT_EQ(after({enter, leave, pre_backward, reduce, step, publish}), UnitState::publishing);
  EXPECT_EQ(after({enter, leave, pre_backward, reduce, step, publish, finish}), UnitState::idle);
}

TEST(Lifecycle, TwoForwardsMayComeBeforeOneBackward) {
  using enum UnitCall;
  EXPECT_EQ(after({enter, leave, enter, leave, pre_backward, pre_backward}), UnitState::backward);
}

TEST(Lifecycle, ACheckpointRecomputesInsideTheBackwardPass) {
  using enum UnitCall;
  EXPECT_EQ(after({enter, leave, pre_backward, enter, leave, reduce}), UnitState::reduced);
}

TEST(Lifecycle, ASecondBackwardMayFollowTheReduction) {
  using enum UnitCall;
  EXPECT_EQ(after({enter, leave, pre_backward, reduce, pre_backward, reduce}), UnitState::reduced);
}

TEST(Lifecycle, AnIllegalCallNamesUnitCallAndBothStates) {
  using enum UnitCall;
  EXPECT_THAT(
      [] {
        after({enter, leave, pre_backward, step});
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("'blocks.0'"), HasSubstr("'step'"),
                                       HasSubstr("'backward'"), HasSubstr("reduced"))));
}

TEST(Lifecycle, OnlyResetLeavesFailed) {
  using enum UnitCall;
  for (const UnitCall call : {enter, leave, pre_backward, reduce, step, publish, finish}) {
    EXPECT_THROW(after({fail, call}), ConfigError) << to_string(call);
  }
  EXPECT_EQ(after({fail, reset}), UnitState::idle);
}

}  // namespace
}  // namespace dmuon

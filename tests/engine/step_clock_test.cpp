// With a time of the test's own: every number is exact.
#include "engine/step_clock.h"

#include <gmock/gmock.h>

#include <numeric>
#include <thread>

#include "tests/support/tiny_training.h"

namespace dmuon {
namespace {

using namespace testing;

class Clock : public ::testing::Test {
 protected:
  static int64_t now() { return time; }
  static inline int64_t time = 0;

  static int64_t of(const StepTimes& times, Phase phase) {
    return times.phase_ns[static_cast<size_t>(phase)];
  }
  static int64_t of(const StepTimes& times, Beside what) {
    return times.beside_ns[static_cast<size_t>(what)];
  }
  static int64_t hidden(const StepTimes& times, Beside what) {
    return times.hidden_ns[static_cast<size_t>(what)];
  }
  static int64_t sum(const StepTimes& times) {
    return std::accumulate(times.phase_ns.begin(), times.phase_ns.end(), int64_t{0});
  }

  StepTimes ended() {
    clock.end_step();
    return clock.last_step();
  }

  StepClock clock{&Clock::now};
};

TEST_F(Clock, APhaseInsideAnotherIsNoPartOfIt) {
  time += 1;
  clock.turn(Phase::forward);
  time += 10;
  {
    const auto fetching = clock.in(Phase::forward_fetch);
    time += 100;
    {
      const auto publishing = clock.in(Phase::publish);
      time += 1000;
    }
    time += 200;
  }
  time += 20;
  const StepTimes times = ended();
  EXPECT_EQ(of(times, Phase::other), 1);
  EXPECT_EQ(of(times, Phase::forward), 30);
  EXPECT_EQ(of(times, Phase::forward_fetch), 300);
  EXPECT_EQ(of(times, Phase::publish), 1000);
  EXPECT_EQ(times.total_ns, 1331);
  EXPECT_EQ(sum(times), times.total_ns);
}

TEST_F(Clock, HiddenIsWhatTheTrainingThreadDoesNotWaitBeside) {
  auto reducing = clock.begin(Beside::reduce);
  time += 5;
  clock.turn(Phase::backward);
  time += 50;
  clock.turn(Phase::reduce_wait);
  time += 500;
  reducing.reset();
  time += 5000;
  const StepTimes times = ended();
  EXPECT_EQ(of(times, Beside::reduce), 555);
  EXPECT_EQ(hidden(times, Beside::reduce), 55);
  EXPECT_EQ(of(times, Beside::publish), 0);
}

TEST_F(Clock, WhatOverlapsCountsOnce) {
  auto first = clock.begin(Beside::reduce);
  time += 10;
  auto second = clock.begin(Beside::reduce);
  time += 10;
  first.reset();
  const auto copy = second;
  second.reset();
  time += 10;
  const StepTimes times = ended();
  EXPECT_EQ(of(times, Beside::reduce), 30);
  ASSERT_EQ(times.spans.size(), 2u);  // the other one is the training thread's
  EXPECT_TRUE(times.spans[1].beside);
  EXPECT_EQ(times.spans[1].end_ns - times.spans[1].begin_ns, 30);
}

TEST_F(Clock, WhatCrossesTheEndOfAStepBelongsToBoth) {
  time += 7;
  auto publishing = clock.begin(Beside::publish);
  time += 3;
  const StepTimes first = ended();
  time += 4;
  publishing.reset();
  time += 6;
  const StepTimes second = ended();
  EXPECT_EQ(first.total_ns, 10);
  EXPECT_EQ(of(first, Beside::publish), 3);
  EXPECT_EQ(second.total_ns, 10);
  EXPECT_EQ(of(second, Beside::publish), 4);
  EXPECT_EQ(clock.steps(), 2);
}

TEST_F(Clock, AStepStartsInNoPhaseOfTheOneBefore) {
  clock.turn(Phase::adamw);
  time += 1;
  ended();
  time += 2;
  const StepTimes times = ended();
  EXPECT_EQ(of(times, Phase::adamw), 0);
  EXPECT_EQ(of(times, Phase::other), 2);
}

TEST_F(Clock, SpansFillTheStep) {
  for (const Phase phase :
       {Phase::forward, Phase::forward_fetch, Phase::forward, Phase::backward}) {
    clock.turn(phase);
    time += 10;
  }
  const StepTimes times = ended();
  int64_t at = 0;
  for (const auto& span : times.spans) {
    EXPECT_EQ(span.begin_ns, at);
    at = span.end_ns;
  }
  EXPECT_EQ(at, times.total_ns);
}

TEST_F(Clock, TooManySpansAreLeftOutOfThePictureNotOfTheSums) {
  for (size_t i = 0; i < StepTimes::kSpans; ++i) {
    clock.turn(Phase::forward);
    time += 1;
    clock.turn(Phase::backward);
    time += 1;
  }
  const StepTimes times = ended();
  EXPECT_EQ(times.spans.size(), StepTimes::kSpans);
  EXPECT_EQ(of(times, Phase::backward), static_cast<int64_t>(StepTimes::kSpans));
  EXPECT_EQ(sum(times), times.total_ns);
}

TEST_F(Clock, NothingIsThereBeforeTheFirstStep) {
  clock.turn(Phase::forward);
  time += 5;
  EXPECT_EQ(clock.steps(), 0);
  EXPECT_EQ(clock.last_step().total_ns, 0);
}

TEST(StepClock, LanesAndTheTrainingThreadAtOnce) {
  StepClock clock;
  std::vector<std::thread> lanes;
  for (int i = 0; i < 3; ++i) {
    lanes.emplace_back([&] {
      for (int n = 0; n < 200; ++n) clock.begin(Beside::publish).reset();
    });
  }
  for (int n = 0; n < 200; ++n) const auto waiting = clock.in(Phase::reduce_wait);
  for (auto& lane : lanes) lane.join();
  clock.end_step();
  const StepTimes times = clock.last_step();
  const int64_t sum = std::accumulate(times.phase_ns.begin(), times.phase_ns.end(), int64_t{0});
  EXPECT_EQ(sum, times.total_ns);
}

// What the engine turns to, on two replicas of two ranks.
TEST(StepClock, AStepOfTheEngineGoesThroughItsPhases) {
  const TinyOptions options{
      .mesh = {.shard = 2, .replicate = 2}, .publish_async = false, .prefetch = true};
  trained(4, options, [](TinyJob& job, int rank, int n) {
    for (int step = 0; step < 2; ++step) {
      loss_of(job.forward(share_of(tiny_batch(step, kRows), rank, n))).backward();
      job.step();
      job.engine->clock().end_step();
    }
    const StepTimes times = job.engine->clock().last_step();
    for (const Phase phase : {Phase::forward, Phase::forward_fetch, Phase::backward,
                              Phase::backward_fetch, Phase::reduce_issue, Phase::reduce_wait,
                              Phase::agreement, Phase::checks, Phase::newton_schulz}) {
      EXPECT_GT(times.phase_ns[static_cast<size_t>(phase)], 0) << to_string(phase);
    }
    for (const Beside what : {Beside::fetch, Beside::reduce, Beside::publish}) {
      const auto i = static_cast<size_t>(what);
      EXPECT_GT(times.beside_ns[i], 0) << to_string(what);
      EXPECT_LE(times.hidden_ns[i], times.beside_ns[i]) << to_string(what);
    }
    const int64_t sum = std::accumulate(times.phase_ns.begin(), times.phase_ns.end(), int64_t{0});
    EXPECT_EQ(sum, times.total_ns);
  });
}

}  // namespace
}  // namespace dmuon

#include "engine/lane.h"

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <latch>
#include <thread>

#include "engine/error.h"

namespace dmuon {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Throws;
using ::testing::ThrowsMessage;

// Holds a lane until opened.
class Gate {
 public:
  void open() { promise_.set_value(); }
  std::function<void()> task() {
    return [opened = opened_] { opened.wait(); };
  }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_ = promise_.get_future().share();
};

std::function<void()> failing(const std::string& text) {
  return [text] { throw RuntimeFailure(text); };
}
void nothing() {}

auto fails_with(const std::string& text) { return ThrowsMessage<RuntimeFailure>(HasSubstr(text)); }
auto waiting(const Event& event) {
  return [event] { event.wait(); };
}

TEST(Event, ByDefaultIsReached) {
  EXPECT_TRUE(Event().query());
  Event().wait();
}

// What both lanes that need no accelerator promise.
class AnyLane : public ::testing::TestWithParam<LaneKind> {
 protected:
  static std::unique_ptr<Lane> make(const std::string& name) {
    return GetParam() == LaneKind::host ? make_host_lane(name) : make_inline_lane(name);
  }
  std::unique_ptr<Lane> lane_ = make("first");
  std::unique_ptr<Lane> other_ = make("second");
};
INSTANTIATE_TEST_SUITE_P(Kinds, AnyLane, ::testing::Values(LaneKind::host, LaneKind::inline_),
                         [](const auto& kind) {
                           return kind.param == LaneKind::host ? "host" : "inline_";
                         });

TEST_P(AnyLane, RunsWorkInTheOrderOfSubmission) {
  std::vector<int> seen;
  for (int i = 0; i < 4; ++i) lane_->submit([&seen, i] { seen.push_back(i); });
  lane_->record().wait();
  EXPECT_THAT(seen, ElementsAre(0, 1, 2, 3));
}

TEST_P(AnyLane, RunsWorkAfterTheEventsOfAnotherLane) {
  std::vector<int> seen;
  const Event first = lane_->submit([&] { seen.push_back(1); });
  other_->submit([&] { seen.push_back(2); }, {first}).wait();
  EXPECT_THAT(seen, ElementsAre(1, 2));
}

TEST_P(AnyLane, AFailureReachesWhoeverWaits) {
  const Event event = lane_->submit(failing("disk on fire"));
  EXPECT_THAT(waiting(event), fails_with("disk on fire"));
  EXPECT_THAT([&] { event.synchronize(); }, fails_with("disk on fire"));
  EXPECT_TRUE(event.query());
}

TEST_P(AnyLane, AFailurePoisonsWhatComesAfterItInTheLane) {
  bool ran = false;
  lane_->submit(failing("first"));
  lane_->submit(failing("second"));
  EXPECT_THAT(waiting(lane_->submit([&] { ran = true; })), fails_with("first"));
  EXPECT_THAT(waiting(lane_->record()), fails_with("first"));
  EXPECT_FALSE(ran);
}

TEST_P(AnyLane, AFailureTravelsWithItsEventAndPoisonsTheOtherLane) {
  bool ran = false;
  const auto run = [&] { ran = true; };
  const Event failed = lane_->submit(failing("first"));
  EXPECT_THAT(waiting(other_->submit(run, {failed})), fails_with("first"));
  EXPECT_THAT(waiting(other_->submit(run)), fails_with("first"));
  EXPECT_FALSE(ran);
}

TEST_P(AnyLane, ResetForgetsAFailure) {
  bool ran = false;
  EXPECT_THAT(waiting(lane_->submit(failing("first"))), Throws<RuntimeFailure>());
  lane_->reset();
  lane_->record().wait();
  lane_->submit([&] { ran = true; }).wait();
  EXPECT_TRUE(ran);
}

TEST_P(AnyLane, WorkRunsWithoutAutogradAndOutsideInferenceMode) {
  c10::InferenceMode inference;
  bool grad = true, inferring = true;
  const auto look = [&] {
    grad = c10::GradMode::is_enabled();
    inferring = c10::InferenceMode::is_enabled();
  };
  lane_->submit(look).wait();
  EXPECT_FALSE(grad);
  EXPECT_FALSE(inferring);
  EXPECT_TRUE(c10::InferenceMode::is_enabled());
}

TEST_P(AnyLane, WorkUsesOneIntraOpThreadAndLeavesTheCallersCountAlone) {
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  int inside = 0;
  lane_->submit([&] { inside = at::get_num_threads(); }).wait();
  EXPECT_EQ(inside, 1);
  EXPECT_EQ(at::get_num_threads(), 3);
  at::set_num_threads(before);
}

TEST_P(AnyLane, ATaskMaySubmitToItsOwnLane) {
  std::vector<int> seen;
  lane_->submit([&] { lane_->submit([&] { seen.push_back(1); }); }).wait();
  lane_->record().wait();
  EXPECT_THAT(seen, ElementsAre(1));
}

TEST_P(AnyLane, AReachedEventHoldsNothingOfItsWork) {
  auto buffer = std::make_shared<int>(0);
  const Event event = lane_->submit([buffer] { ++*buffer; });
  event.wait();
  EXPECT_EQ(buffer.use_count(), 1);
}

TEST(HostLane, RunsBesideTheCaller) {
  auto lane = make_host_lane("a");
  Gate gate;
  const Event event = lane->submit(gate.task());
  EXPECT_FALSE(event.query());
  gate.open();
  event.wait();
  EXPECT_TRUE(event.query());
}

TEST(HostLane, ALaneThatBlocksStopsNoOther) {
  constexpr int count = 12;  // more than the pool has threads at first
  std::vector<std::unique_ptr<Lane>> lanes;
  std::latch all_arrived(count);
  for (int i = 0; i < count; ++i) {
    lanes.push_back(make_host_lane("lane"));
    lanes.back()->submit([&] { all_arrived.arrive_and_wait(); });
  }
  all_arrived.wait();
}

TEST(HostLane, WorkThatWaitsForAnotherLaneHoldsNoThread) {
  auto slow = make_host_lane("slow");
  std::vector<std::unique_ptr<Lane>> lanes;
  Gate gate;
  const Event opened = slow->submit(gate.task());
  std::atomic<int> ran = 0;
  for (int i = 0; i < 8; ++i) {
    lanes.push_back(make_host_lane("lane"));
    lanes.back()->submit([&] { ++ran; }, {opened, opened});
  }
  auto free = make_host_lane("free");
  free->submit(nothing).wait();
  EXPECT_EQ(ran, 0);
  gate.open();
  for (auto& lane : lanes) lane->record().wait();
  EXPECT_EQ(ran, 8);
}

TEST(HostLane, KeepsItsOrderWhileItsHeadWaitsForAnotherLane) {
  auto lane = make_host_lane("a"), slow = make_host_lane("slow");
  Gate gate;
  std::vector<int> seen;
  lane->submit([&] { seen.push_back(1); }, {slow->submit(gate.task())});
  const Event last = lane->submit([&] { seen.push_back(2); });
  EXPECT_FALSE(last.query());
  gate.open();
  last.wait();
  EXPECT_THAT(seen, ElementsAre(1, 2));
}

TEST(HostLane, AWaiterRunsWhatNobodyHasStarted) {
  auto lane = make_host_lane("a"), slow = make_host_lane("slow");
  Gate gate;
  const Event opened = slow->submit(gate.task());
  std::thread::id runner;
  const Event event = lane->submit([&] { runner = std::this_thread::get_id(); }, {opened});
  gate.open();
  event.wait();  // by the pool or by us: both are right, and both end here
  EXPECT_NE(runner, std::thread::id());
}

TEST(HostLane, AnyNumberOfThreadsMaySubmitAndWait) {
  auto lane = make_host_lane("a");
  int64_t sum = 0;  // only ever touched by the lane
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) lane->submit([&] { ++sum; }).wait();
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(sum, 800);
}

TEST(HostLane, LanesThatFeedEachOtherComeToAnEnd) {
  auto a = make_host_lane("a"), b = make_host_lane("b");
  int64_t value = 0;  // ordered by the events alone
  Event event;
  for (int i = 0; i < 500; ++i) {
    event = (i % 2 ? a : b)->submit([&] { ++value; }, {event});
  }
  event.wait();
  EXPECT_EQ(value, 500);
}

TEST(HostLane, LanesThatWaitForEachOtherAreToldSo) {
  auto a = make_host_lane("a"), b = make_host_lane("b");
  Gate gate;
  std::promise<Event> later;
  const Event first = a->submit([&, held = gate.task()] {
    held();
    later.get_future().get().wait();
  });
  later.set_value(b->submit(nothing, {a->submit(nothing)}));
  gate.open();
  EXPECT_THAT(waiting(first), ThrowsMessage<ConfigError>(HasSubstr("lane 'a' waits for work")));
}

TEST(HostLane, DestroyingItWaitsForTheTaskInProgressAndDropsTheOthers) {
  auto lane = make_host_lane("doomed"), slow = make_host_lane("slow"), other = make_host_lane("b");
  Gate first_gate, slow_gate;
  std::latch started(1);
  bool finished = false, ran = false;
  lane->submit([&, held = first_gate.task()] {
    started.count_down();
    held();
    finished = true;
  });
  const Event second = lane->submit([&] { ran = true; }, {slow->submit(slow_gate.task())});
  const Event third = other->submit([&] { ran = true; }, {second});
  started.wait();
  std::thread opener([&] { first_gate.open(); });
  lane.reset();
  EXPECT_TRUE(finished);
  EXPECT_THAT(waiting(second), fails_with("lane 'doomed' was closed"));
  EXPECT_THAT(waiting(third), fails_with("lane 'doomed' was closed"));
  EXPECT_FALSE(ran);
  slow_gate.open();
  opener.join();
}

TEST(HostLane, ATaskThatWaitsForItsOwnLaneIsToldSo) {
  auto lane = make_host_lane("a");
  std::promise<Event> later;
  const Event first = lane->submit([&] { later.get_future().get().wait(); });
  later.set_value(lane->submit(nothing));
  EXPECT_THAT(waiting(first), ThrowsMessage<ConfigError>(HasSubstr("lane 'a' waits for work")));
}

TEST(HostLane, AnEventOutlivesItsLaneAndThePool) {
  Event event;
  {
    auto lane = make_host_lane("a");
    event = lane->submit(nothing);
    event.wait();
  }
  EXPECT_TRUE(event.query());
  event.wait();
}

TEST(HostLane, TakesEventsOfOtherKindsOfLanes) {
  auto host = make_host_lane("a"), here = make_inline_lane("b");
  std::vector<int> seen;
  const Event first = host->submit([&] { seen.push_back(1); });
  const Event second = here->submit([&] { seen.push_back(2); }, {first});
  host->submit([&] { seen.push_back(3); }, {second}).wait();
  EXPECT_THAT(seen, ElementsAre(1, 2, 3));
  EXPECT_THAT(waiting(host->submit(nothing, {here->submit(failing("inline"))})),
              fails_with("inline"));
}

TEST(InlineLane, RunsBeforeSubmitReturns) {
  auto lane = make_inline_lane("a");
  std::thread::id runner;
  EXPECT_TRUE(lane->submit([&] { runner = std::this_thread::get_id(); }).query());
  EXPECT_EQ(runner, std::this_thread::get_id());
}

TEST(DeviceLane, NeedsAnAccelerator) {
  EXPECT_THAT([] { make_device_lane("reduce", c10::Device("cpu")); },
              ThrowsMessage<ConfigError>(HasSubstr("lane 'reduce' was asked for on device 'cpu'")));
}

}  // namespace
}  // namespace dmuon

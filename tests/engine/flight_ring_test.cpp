#include "engine/flight_ring.h"

#include <gmock/gmock.h>

#include <thread>

#include "engine/error.h"

namespace dmuon {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

auto sequence_is(int64_t sequence) { return Field(&FlightRecord::sequence, sequence); }

TEST(FlightRing, HoldsTheLastRecordsOldestFirst) {
  FlightRing ring(3);
  for (int i = 0; i < 5; ++i) ring.begin(Op::broadcast, "a", 0, 1);
  EXPECT_THAT(ring.records(), ElementsAre(sequence_is(2), sequence_is(3), sequence_is(4)));
}

TEST(FlightRing, TotalsCoverWhatHasLeftTheRing) {
  FlightRing ring(2);
  for (int i = 0; i < 10; ++i) ring.begin(Op::exchange, "a", -1, 7);
  EXPECT_EQ(ring.total_operations(), 10);
  EXPECT_EQ(ring.total_sent_bytes(), 70);
}

TEST(FlightRing, TotalsByPrefixOfTheUnit) {
  FlightRing ring;
  ring.begin(Op::broadcast, "blocks.1", 0, 1);
  ring.begin(Op::broadcast, "blocks.10", 0, 10);
  ring.begin(Op::broadcast, "block", 0, 100);
  ring.begin(Op::all_reduce, "agreement", -1, 1000);
  EXPECT_EQ(ring.total_sent_bytes("blocks.1"), 11);
  EXPECT_EQ(ring.total_sent_bytes("blocks.10"), 10);
  EXPECT_EQ(ring.total_sent_bytes("embedding"), 0);
  EXPECT_EQ(ring.total_sent_bytes(), 1111);
}

TEST(FlightRing, ARecordKnowsItsStepAndState) {
  FlightRing ring;
  ring.set_step(4);
  ring.end(ring.begin(Op::broadcast, "a", 1, 8), OpState::done);
  ring.end(ring.begin(Op::exchange, "b", -1, 8), OpState::failed);
  ring.begin(Op::all_gather, "c", -1, 8);
  const auto state_is = [](OpState state) { return Field(&FlightRecord::state, state); };
  const auto records = ring.records();
  EXPECT_THAT(records, ElementsAre(state_is(OpState::done), state_is(OpState::failed),
                                   state_is(OpState::issued)));
  EXPECT_EQ(records[0].step, 4);
  EXPECT_GE(records[0].duration_us, 0);
  EXPECT_LE(records[0].start_us, records[1].start_us);
}

TEST(FlightRing, EndingARecordThatHasLeftChangesNoOther) {
  FlightRing ring(1);
  const int64_t left = ring.begin(Op::broadcast, "a", 0, 1);
  ring.begin(Op::broadcast, "b", 0, 1);
  ring.end(left, OpState::failed);
  EXPECT_EQ(ring.records()[0].state, OpState::issued);
}

TEST(FlightRing, DumpsOneLinePerRecord) {
  FlightRing ring;
  ring.set_step(3);
  ring.end(ring.begin(Op::broadcast, "blocks.0", 1, 4096), OpState::done);
  ring.begin(Op::all_reduce, "agreement", -1, 64);
  EXPECT_THAT(ring.dump(), HasSubstr("#0 step 3 broadcast 'blocks.0' root 1 4096 B sent, done"));
  EXPECT_THAT(ring.dump(), HasSubstr("#1 step 3 all_reduce 'agreement' 64 B sent, issued"));
  EXPECT_THAT(ring.dump(1), ::testing::Not(HasSubstr("#0")));
}

TEST(FlightRing, RefusesToHoldNothing) {
  EXPECT_THAT([] { FlightRing ring(0); }, ThrowsMessage<ConfigError>(HasSubstr("capacity is 0")));
}

TEST(FlightRing, ManyThreadsRecordAtOnce) {
  FlightRing ring(64);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 100; ++n) ring.end(ring.begin(Op::broadcast, "a", 0, 2), OpState::done);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ring.total_sent_bytes("a"), 800);
  EXPECT_THAT(ring.records(), SizeIs(64));
}

}  // namespace
}  // namespace dmuon

#include "tests/support/sim_transport.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <latch>
#include <stdexcept>

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

using Body = std::function<void(Transport&)>;

std::function<void()> on_ranks(SimWorld& world, const Body& body) {
  return
      [&world, body] { run_ranks(world.size(), [&](int rank) { body(*world.transport(rank)); }); };
}

void sum_ones(Transport& transport, const std::string& unit = "a") {
  at::Tensor tensor = at::full({2}, 1.0);
  transport.all_reduce(tensor, ReduceOp::sum, unit);
  EXPECT_EQ(tensor[0].item<int>(), transport.size());
}

TEST(SimTransport, RanksThatDisagreeOnTheOperationAllLearnBothSides) {
  SimWorld world(3);
  std::atomic<int> told = 0;
  run_ranks(3, [&](int rank) {
    const auto transport = world.transport(rank);
    const auto call = [&] {
      if (rank == 1) return sum_ones(*transport, "other");
      transport->broadcast({{at::zeros({4}), 2}}, "blocks.0");
    };
    EXPECT_THAT(
        call, ThrowsMessage<RuntimeFailure>(
                  AllOf(HasSubstr("operation 0 of group 'main'"),
                        HasSubstr("ranks 0, 2 calls broadcast 'blocks.0' [4 x Float from rank 2]"),
                        HasSubstr("rank 1 calls all_reduce sum 'other' of 2 x Float"))));
    ++told;
  });
  EXPECT_EQ(told, 3);
}

TEST(SimTransport, RanksThatDisagreeOnASizeAreNamed) {
  SimWorld world(2);
  const auto body = [](Transport& transport) {
    const int64_t sent = transport.rank() == 0 ? 3 : 0;
    std::vector<int64_t> sends{0, sent}, receives{0, 0};
    if (transport.rank() == 1) receives[0] = 2, sends[1] = 0;
    transport.exchange(at::zeros({receives[0]}), receives, at::zeros({sent}), sends, "w");
  };
  EXPECT_THAT(on_ranks(world, body), ThrowsMessage<RuntimeFailure>(HasSubstr(
                                         "rank 0 sends 3 elements to rank 1, which receives 2")));
}

TEST(SimTransport, AFailureAskedForHappensAtThatOperationAndFreesTheOthers) {
  SimWorld world(3);
  world.fail(1, 2, "cable pulled");
  std::atomic<int> sums = 0;
  const auto body = [&](Transport& transport) {
    for (int i = 0; i < 4; ++i) sum_ones(transport), ++sums;
  };
  EXPECT_THAT(on_ranks(world, body), ThrowsMessage<RuntimeFailure>(HasSubstr("cable pulled")));
  EXPECT_EQ(sums, 6);
}

TEST(SimTransport, ARankThatThrowsFreesThoseThatWaitForIt) {
  SimWorld world(3);
  const auto body = [](Transport& transport) {
    if (transport.rank() == 2) throw std::logic_error("a bug on rank 2");
    sum_ones(transport);
  };
  EXPECT_THAT(on_ranks(world, body), ThrowsMessage<std::logic_error>(HasSubstr("on rank 2")));
}

TEST(SimTransport, AbortFreesTheOthersAndTellsThemWhy) {
  SimWorld world(2);
  const auto body = [](Transport& transport) {
    if (transport.rank() == 1) return transport.abort("loss is not finite");
    sum_ones(transport);
  };
  EXPECT_THAT(on_ranks(world, body),
              ThrowsMessage<PeerFailure>(AnyOf(HasSubstr("rank 1 aborted: loss is not finite"))));
}

TEST(SimTransport, AClosedTransportStaysClosed) {
  SimWorld world(1 + 1);
  world.fail(0, 0, "down");
  run_ranks(2, [&](int rank) {
    const auto transport = world.transport(rank);
    EXPECT_THROW(sum_ones(*transport), RuntimeFailure);
    EXPECT_THROW(sum_ones(*transport), RuntimeFailure);
  });
}

TEST(SimTransport, ARankThatIsDoneDisturbsNoFinishedOperation) {
  for (int seed = 0; seed < 20; ++seed) {
    SimWorld world(4);
    world.reorder(seed);
    on_ranks(world, [](Transport& transport) { sum_ones(transport); })();
  }
}

TEST(SimTransport, ADelayedRankHoldsTheOthersAndChangesNoResult) {
  SimWorld world(3);
  world.delay("main", 1, std::chrono::milliseconds(2), 2);
  world.delay("main", 0, std::chrono::milliseconds(1));
  on_ranks(world, [](Transport& transport) {
    for (int i = 0; i < 3; ++i) sum_ones(transport);
  })();
  EXPECT_EQ(world.log().size(), 3);
}

TEST(SimTransport, GroupsAreIndependentAndLogged) {
  SimWorld world(2);
  run_ranks(2, [&](int rank) {
    const auto reduce = world.transport(rank, "reduce"), publish = world.transport(rank, "publish");
    sum_ones(*reduce);
    publish->broadcast({{at::zeros({1}), 0}}, "b");
    sum_ones(*reduce);
  });
  const auto is = [](const char* group, int index) {
    return AllOf(Field(&SimOperation::group, group), Field(&SimOperation::index, index));
  };
  EXPECT_THAT(world.log(), ElementsAre(is("reduce", 0), is("publish", 0), is("reduce", 1)));
}

// Columns of a 2 x 2 grid.
TEST(SimTransport, GroupsOfSomeRanksCountTheirOwn) {
  SimWorld world(4);
  run_ranks(4, [&](int rank) {
    const std::vector<int> column{rank % 2, rank % 2 + 2};
    const auto transport = world.transport(rank, SimGroup{"columns", column});
    EXPECT_EQ(transport->rank(), rank / 2);
    at::Tensor sum = at::full({1}, rank);
    transport->all_reduce(sum, ReduceOp::sum, "a");
    EXPECT_EQ(sum.item<int>(), column[0] + column[1]);
  });
  EXPECT_THAT(world.log(), UnorderedElementsAre(Field(&SimOperation::group, "columns 0 2"),
                                                Field(&SimOperation::group, "columns 1 3")));
}

TEST(SimTransport, AFailureInOneGroupDisturbsNoOtherOfItsName) {
  SimWorld world(4);
  world.fail(2, 0, "cable pulled", "columns");
  run_ranks(4, [&](int rank) {
    const auto transport = world.transport(rank, SimGroup{"columns", {rank % 2, rank % 2 + 2}});
    if (rank % 2) return sum_ones(*transport);
    EXPECT_THROW(sum_ones(*transport), RuntimeFailure);
  });
}

TEST(SimTransport, AStartedExchangeArrivesWhenItIsWaitedFor) {
  SimWorld world(2);
  world.delay("main", 0, std::chrono::milliseconds(20), 1);
  on_ranks(world, [](Transport& transport) {
    const at::Tensor sent = at::full({1}, transport.rank() + 1.0f), received = at::zeros({1});
    std::vector<int64_t> counts{1, 1};
    counts[transport.rank()] = 0;
    const auto pending = transport.start_exchange(received, counts, sent, counts, "a");
    pending->wait();
    EXPECT_EQ(received.item<int>(), 2 - transport.rank());
    sum_ones(transport);
  })();
}

}  // namespace
}  // namespace dmuon::testing

// Where an operation of any axis fails, every rank raises and none waits for ever; and all ranks
// call the same operations in the same order, whatever the timing.
#include <gmock/gmock.h>

#include <atomic>
#include <stdexcept>

#include "engine/engine.h"
#include "engine/error.h"
#include "tests/support/tiny_training.h"

namespace dmuon {
namespace {

using namespace testing;

// Each of the four cells owns one matrix, and each matrix is cut.
TinyOptions cube() {
  TinyOptions options{.mesh = {.shard = 2, .replicate = 2, .tp = 2}, .cuts = some_cuts(2)};
  options.cuts.merge(other_cuts(2));
  return options;
}

std::map<std::string, std::vector<std::string>> by_group(const SimWorld& world) {
  std::map<std::string, std::vector<std::string>> operations;
  for (const SimOperation& operation : world.log()) {
    operations[operation.group].push_back(operation.what);
  }
  return operations;
}

TEST(MeshFailures, TheOrderOfCollectivesDoesNotDependOnTiming) {
  const auto order = [](uint64_t seed) {
    SimWorld world(8);
    if (seed) world.reorder(seed);
    trained(world, cube(),
            [](TinyJob& job, int cell, int cells) { plain_steps(job, cell, cells, 3); });
    return by_group(world);
  };
  const auto expected = order(0);
  for (const uint64_t seed : {1, 2, 3, 4, 5}) EXPECT_EQ(order(seed), expected);
}

class AFailedOperation : public ::testing::TestWithParam<Channel> {};

INSTANTIATE_TEST_SUITE_P(MeshFailures, AFailedOperation,
                         ::testing::Values(Channel::materialise, Channel::reduce,
                                           Channel::replicate_reduce, Channel::publish,
                                           Channel::tp_gather, Channel::tp_scatter,
                                           Channel::control),
                         [](const auto& info) { return std::string(to_string(info.param)); });

// How many of 8 ranks raise, where an operation fails on one.
int raising(const TinyOptions& options, int failing, Channel channel) {
  SimWorld world(8);
  world.fail(failing, 2, "the wire is cut", to_string(channel));
  std::atomic<int> raised = 0;
  run_ranks(8, [&](int rank) {
    TinyJob job(world, rank, options);
    try {
      plain_steps(job, job.grid().cell(), 4, 8);
    } catch (const std::exception&) {
      ++raised;
    }
  });
  return raised;
}

TEST_P(AFailedOperation, RaisesOnEveryRank) {
  for (const int failing : {0, 5}) EXPECT_EQ(raising(cube(), failing, GetParam()), 8);
}

TEST(MeshFailures, AFailedExchangeOfGramMatricesRaisesOnEveryRank) {
  TinyOptions options = cube();
  options.sharded_gram = ShardedGram::always;
  EXPECT_EQ(raising(options, 3, Channel::tp_scatter), 8);
}

// A small reduction is finished by whoever collects it, and its failure is not used up by the
// first.
TEST(MeshFailures, AFailedReductionRaisesAgainToWhoeverComesNext) {
  SimWorld world(2);
  world.fail(0, 2, "the wire is cut", to_string(Channel::reduce));
  run_ranks(2, [&](int rank) {
    TinyJob job(world, rank, {.mesh = {.shard = 2}});
    const auto raises =
        ::testing::ThrowsMessage<std::runtime_error>(::testing::HasSubstr("the wire is cut"));
    EXPECT_THAT([&] { plain_steps(job, job.grid().cell(), 2, 8); }, raises);
    for (int i = 0; i < 2; ++i) EXPECT_THAT([&] { job.engine->wait_reductions(); }, raises);
  });
}

TEST_P(AFailedOperation, IsNamedByTheRankThatItFailedOn) {
  SimWorld world(8);
  world.fail(0, 2, "the wire is cut", to_string(GetParam()));
  const auto train = [&] {
    trained(world, cube(),
            [](TinyJob& job, int cell, int cells) { plain_steps(job, cell, cells, 8); });
  };
  EXPECT_THAT(
      train, ::testing::ThrowsMessage<std::runtime_error>(::testing::HasSubstr("the wire is cut")));
}

TEST(MeshFailures, AJobMayEndWithUpdatesInFlight) {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    SimWorld world(8);
    world.reorder(seed);
    run_ranks(8, [&](int rank) {
      TinyJob job(world, rank, cube());
      plain_steps(job, job.grid().cell(), 4, 1);
    });
  }
}

}  // namespace
}  // namespace dmuon

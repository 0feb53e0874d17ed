// Two data-parallel axes and a tensor-parallel one, against one process: weights, bits, counts.
#include <gmock/gmock.h>

#include <cmath>
#include <mutex>

#include "engine/engine.h"
#include "engine/gradients.h"
#include "tests/engine/any_mesh.h"

namespace dmuon {
namespace {

using ::testing::Each;
using namespace testing;

class Mesh : public AnyMesh {};

// 8x1x1: more replicas than matrices.
INSTANTIATE_TEST_SUITE_P(Engine, Mesh,
                         ::testing::Values(MeshCase{2, 2, 1}, MeshCase{4, 1, 1}, MeshCase{1, 4, 1},
                                           MeshCase{8, 1, 1}, MeshCase{1, 1, 2}, MeshCase{1, 1, 4},
                                           MeshCase{1, 2, 2}, MeshCase{2, 1, 2}, MeshCase{2, 2, 2}),
                         mesh_name);

const Script kFiveSteps = [](TinyJob& job, int cell, int cells) {
  plain_steps(job, cell, cells, 5);
};

TEST_P(Mesh, EqualsOneProcess) { expect_equal_to_one_process(run(kFiveSteps), reference_steps(5)); }

TEST_P(Mesh, EqualsOneProcessWhateverIsCut) {
  TinyOptions options = this->options();
  options.cuts = other_cuts(GetParam().tp);
  expect_equal_to_one_process(run(options, kFiveSteps), reference_steps(5));
}

TEST_P(Mesh, MicroBatchesEqualOneBatchWithAndWithoutSync) {
  for (const bool sync : {false, true}) {
    const auto got = run([sync](TinyJob& job, int cell, int cells) {
      for (int micro = 0; micro < 3; ++micro) {
        job.adapter->sync = sync || micro == 2;
        loss_of(job.forward(share_of(tiny_batch(micro, kRows), cell, cells))).backward();
      }
      job.step();
    });
    expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
      for (int micro = 0; micro < 3; ++micro) loss_of(reference.forward(x(micro))).backward();
      reference.step();
    });
  }
}

TEST_P(Mesh, BitsDependOnNoOptionThatMovesThemAndOnNoTiming) {
  const TinyOptions plain = options();
  const Weights expected = run(plain, kFiveSteps);
  TinyOptions sync = plain, shared = plain, separate = plain, resident = plain;
  sync.publish_async = false;
  shared.share_staging = true;
  separate.pack = false;
  resident.residency = Residency::resident_after_forward;
  EXPECT_TRUE(same_bits(expected, run(sync, kFiveSteps)));
  EXPECT_TRUE(same_bits(expected, run(shared, kFiveSteps)));
  EXPECT_TRUE(same_bits(expected, run(separate, kFiveSteps)));
  EXPECT_TRUE(same_bits(expected, run(resident, kFiveSteps)));
  for (const uint64_t seed : {1, 2, 3}) {
    EXPECT_TRUE(same_bits(expected, run(plain, kFiveSteps, seed)));
    EXPECT_TRUE(same_bits(expected, run(shared, kFiveSteps, seed)));
  }
}

TEST_P(Mesh, NewtonSchulzRunsOncePerMatrixAndStepInTheWholeJob) {
  for (const ShardedGram policy : {ShardedGram::never, ShardedGram::always}) {
    TinyOptions options = this->options();
    options.sharded_gram = policy;
    std::mutex mutex;
    std::vector<int64_t> calls(4, 0);
    int64_t all = 0;
    run(options, [&](TinyJob& job, int cell, int cells) {
      plain_steps(job, cell, cells, 3);
      std::lock_guard lock(mutex);
      all += job.optimizer->ns_calls();
      for (int m = 0; m < 4; ++m) calls[m] += job.optimizer->ns_calls_per_matrix()[m];
    });
    EXPECT_EQ(all, 4 * 3);
    EXPECT_THAT(calls, Each(3));
  }
}

// A forward right after an asynchronous step, without waiting for anything.
TEST_P(Mesh, AForwardRightAfterTheStepSeesItOnEveryRank) {
  std::mutex mutex;
  std::vector<std::pair<int, Weights>> seen;
  const Weights owned = run([&](TinyJob& job, int cell, int cells) {
    plain_steps(job, cell, cells, 2);
    Weights weights = job.seen_weights();
    std::lock_guard lock(mutex);
    seen.emplace_back(job.grid().position().tp, std::move(weights));
  });
  const Cuts cuts = options().cuts;
  for (const auto& [tp, weights] : seen) {
    for (const auto& [name, weight] : weights) {
      const TpLayout layout = cuts.contains(name) ? cuts.at(name) : TpLayout();
      EXPECT_TRUE(weight.equal(shard_of(owned.at(name), layout, tp))) << name;
    }
  }
}

TEST_P(Mesh, TheOwnersCellAloneHoldsMastersAndMomentumLiesOnce) {
  std::mutex mutex;
  std::vector<int64_t> masters(4, 0), momentum(4, 0);
  run([&](TinyJob& job, int cell, int cells) {
    plain_steps(job, cell, cells, 1);
    std::lock_guard lock(mutex);
    for (int m = 0; m < 4; ++m) {
      const auto place = job.engine->place(m);
      masters[m] += job.engine->store(place.unit).master(place.slot).defined();
      for (const auto& [name, state] : job.optimizer->state(m)) momentum[m] += state.numel();
    }
  });
  EXPECT_THAT(masters, Each(GetParam().tp));
  EXPECT_THAT(momentum, Each(4 * kInner));
}

TEST_P(Mesh, ANormCountsEachElementOnce) {
  std::mutex mutex;
  std::vector<double> norms;
  run([&](TinyJob& job, int cell, int cells) {
    loss_of(job.forward(share_of(tiny_batch(1, kRows), cell, cells))).backward();
    const double norm = gradient_norm(*job.engine, {.matrices = {0, 1, 2, 3}}, 2);
    std::lock_guard lock(mutex);
    norms.push_back(norm);
  });
  TinyReference reference;
  loss_of(reference.forward(tiny_batch(1, kRows))).backward();
  double squares = 0;
  for (const auto& [name, weight] : reference.weights()) {
    squares += weight.grad().pow(2).sum().item<double>();
  }
  EXPECT_THAT(norms, Each(::testing::DoubleNear(std::sqrt(squares), 1e-6 * std::sqrt(squares))));
}

TEST(MeshEngine, AnAxisOfOneRankChangesNoBit) {
  const Weights absent = trained(4, {}, kFiveSteps);
  EXPECT_TRUE(same_bits(absent, trained(4, {.one_rank_axes = true}, kFiveSteps)));
  EXPECT_TRUE(
      same_bits(absent, trained(4, {.cuts = some_cuts(1), .one_rank_axes = true}, kFiveSteps)));
}

TEST(MeshEngine, EachUnitMovesOncePerAxisAndDirection) {
  SimWorld world(8);
  constexpr int kSteps = 3;
  trained(world, {.mesh = {.shard = 2, .replicate = 2, .tp = 2}, .cuts = some_cuts(2)},
          [](TinyJob& job, int cell, int cells) { plain_steps(job, cell, cells, kSteps); });
  std::map<std::pair<std::string, std::string>, int> operations;  // by group and unit
  for (const SimOperation& operation : world.log()) {
    for (const char* unit : {"blocks.0", "blocks.1"}) {
      const bool is_for_it = operation.what.find(unit) != std::string::npos;
      if (is_for_it) ++operations[{operation.group, unit}];
    }
  }
  for (const auto& [what, count] : operations) {
    const auto& [group, unit] = what;
    if (group.starts_with("materialise")) continue;
    // The first forward makes replicas and TP ranks equal.
    const bool equalises = group.starts_with("publish") || group.starts_with("tp_scatter");
    EXPECT_LE(count, kSteps + equalises) << group << ' ' << unit;
  }
}

}  // namespace
}  // namespace dmuon

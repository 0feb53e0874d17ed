// Matrices that stay in their shards (tp_distributed_gram), in a whole training job.
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>

#include <cmath>
#include <mutex>

#include "engine/engine.h"
#include "tests/engine/any_mesh.h"

namespace dmuon {
namespace {

using namespace testing;

constexpr int64_t kWide = 96;

class MeshInShards : public AnyMesh {
 protected:
  TinyOptions options(ShardedGram policy) const {
    TinyOptions options = AnyMesh::options();
    options.sharded_gram = policy;
    options.inner = kWide;
    // Of each, the long dim: uneven, in blocks, and with nothing on the last rank.
    const int tps = GetParam().tp;
    std::vector<int64_t> all_but_last(tps, 0);
    for (int64_t i = 0; i < kWide; ++i) ++all_but_last[i % (tps - 1)];
    options.cuts = {{"blocks.0.up", cut_in_blocks({kWide, 4}, 0, {33, 63}, tps)},
                    {"blocks.0.down", cut_evenly({4, kWide}, 1, tps)},
                    {"blocks.1.up", cut_in_pieces({kWide, 4}, 0, all_but_last)}};
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Engine, MeshInShards,
                         ::testing::Values(MeshCase{1, 1, 2}, MeshCase{1, 2, 2}, MeshCase{2, 2, 2},
                                           MeshCase{1, 1, 4}),
                         mesh_name);

const Script kThreeSteps = [](TinyJob& job, int cell, int cells) {
  plain_steps(job, cell, cells, 3);
};

TEST_P(MeshInShards, EqualsOneProcess) {
  for (const ShardedGram policy : {ShardedGram::beneficial, ShardedGram::always}) {
    const auto got = run(options(policy), [](TinyJob& job, int cell, int cells) {
      plain_steps(job, cell, cells, 3);
      EXPECT_EQ(job.optimizer->in_shards().size(), 3u);
    });
    expect_equal_to_one_process(got, reference_steps(3), kWide);
  }
}

TEST_P(MeshInShards, NoGradientIsGathered) {
  SimWorld world(GetParam().ranks());
  trained(world, options(ShardedGram::beneficial), kThreeSteps);
  for (const SimOperation& operation : world.log()) {
    EXPECT_FALSE(operation.group.starts_with("tp_gather")) << operation.what;
  }
}

TEST_P(MeshInShards, BitsDoNotDependOnTimingOrOnWhenUpdatesArePublished) {
  TinyOptions sync = options(ShardedGram::always);
  const Weights expected = run(sync, kThreeSteps);
  sync.publish_async = false;
  EXPECT_TRUE(same_bits(expected, run(sync, kThreeSteps)));
  for (const uint64_t seed : {1, 2, 3}) {
    EXPECT_TRUE(same_bits(expected, run(options(ShardedGram::always), kThreeSteps, seed)));
  }
}

TEST_P(MeshInShards, MomentumLiesWhereTheShardDoes) {
  std::mutex mutex;
  std::vector<int64_t> momentum(4, 0);
  run(options(ShardedGram::always), [&](TinyJob& job, int cell, int cells) {
    plain_steps(job, cell, cells, 1);
    std::lock_guard lock(mutex);
    for (int m = 0; m < 4; ++m) {
      for (const auto& [name, state] : job.optimizer->state(m)) {
        const Slot& slot = job.engine->slot(m);
        EXPECT_EQ(state.numel(), slot.in_shards ? slot.numel : 4 * kWide) << name;
        momentum[m] += state.numel();
      }
    }
  });
  EXPECT_THAT(momentum, ::testing::Each(4 * kWide));
}

TEST_P(MeshInShards, AMatrixThatNoForwardUsesKeepsWeightAndMomentum) {
  const auto script = [](auto& job, const at::Tensor& first, const at::Tensor& second) {
    backward(job, first);
    job.step();
    job.zero_grad();
    loss_of(job.block(1, job.block(0, second, /*used=*/1))).backward();
    job.step();
  };
  const auto got = run(options(ShardedGram::always), [&](TinyJob& job, int cell, int cells) {
    script(job, share(1, cell, cells), share(2, cell, cells));
  });
  expect_equal_to_one_process(
      got, [&](TinyReference& reference, const Batch& x) { script(reference, x(1), x(2)); }, kWide);
}

// Along the short dim the Gram matrix has a null space, where rounding grows to 1.4e-4 of the
// orthogonal matrix (kernels/sharded_gram.h). A step has lr 0.05, scale 0.2 sqrt(7) and a matrix of
// norm 1.14 sqrt(4) at most; three of them, and as much again for the gradients that follow.
TEST_P(MeshInShards, AlongTheShortDimErrsAsItsGramFormDoes) {
  TinyOptions options = AnyMesh::options();
  const Weights whole = run(options, kThreeSteps);
  options.sharded_gram = ShardedGram::always;
  const Weights sharded = run(options, kThreeSteps);
  const double step = 0.05 * 0.2 * std::sqrt(7.0) * 1.14 * 2;
  for (const auto& [name, weight] : whole) {
    EXPECT_LE((weight - sharded.at(name)).norm().item<double>(), 2 * 3 * 1.4e-4 * step) << name;
  }
}

}  // namespace
}  // namespace dmuon

#include "engine/sharded_newton_schulz.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <gmock/gmock.h>

#include <atomic>
#include <functional>

#include "engine/tp_exchange.h"
#include "tests/kernels/shards.h"
#include "tests/support/tiny_unit.h"

namespace dmuon {
namespace {

using ::testing::Eq;
using ::testing::Optional;
using namespace testing;

constexpr int kTps = 3;

// Along the long dim and along the short one; in blocks, uneven, with nothing on a rank; a batch.
const TinyUnit& a_unit() {
  static const TinyUnit unit({.tp = kTps},
                             {{"batch", {2, 3, 24}, cut_evenly({2, 3, 24}, 2, kTps), 2},
                              {"blocks", {4, 30}, cut_in_blocks({4, 30}, 1, {20, 10}, kTps), 1},
                              {"empty", {30, 4}, cut_in_pieces({30, 4}, 0, {11, 0, 19}), 1},
                              {"short", {5, 8}, cut_evenly({5, 8}, 0, kTps), 0}});
  return unit;
}

const TpLayout& layout_of(int matrix) {
  return a_unit().layout(a_unit().plan().matrices[matrix].name);
}

at::Tensor piece_of(int matrix, int tp) {
  const at::Tensor whole = some_integers(layout_of(matrix).sizes, matrix).sin();
  return shard_of(whole, layout_of(matrix), tp);
}

using HasShard = std::function<bool(int matrix, int tp)>;

// Of the ranks that have a shard, by the kernels alone.
std::vector<at::Tensor> expected_pieces(int matrix, const HasShard& has) {
  std::vector<at::Tensor> pieces;
  for (int tp = 0; tp < kTps; ++tp) {
    if (has(matrix, tp)) pieces.push_back(piece_of(matrix, tp));
  }
  if (pieces.empty()) return std::vector<at::Tensor>(kTps);
  std::vector<at::Tensor> results =
      orthogonalised(pieces, *cut_dim(a_unit().plan().matrices[matrix], layout_of(matrix)), {});
  for (int tp = 0; tp < kTps; ++tp) {
    if (!has(matrix, tp)) results.insert(results.begin() + tp, at::Tensor());
  }
  return results;
}

void run(ShardedNewtonSchulz& sharded) {
  for (int round = 0; round < sharded_gram_rounds({}); ++round) {
    sharded.send_grams();
    sharded.send_factors();
    sharded.apply_factors();
  }
}

// Expects the bits of the kernels; returns how many matrices all ranks led.
int expect_the_kernels_pieces(const HasShard& has) {
  SimWorld world(kTps);
  std::atomic<int> led = 0;
  run_ranks(kTps, [&](int tp) {
    const auto transport = world.transport(tp);
    const UnitStore store = a_unit().store({.tp = tp});
    ShardedNewtonSchulz sharded(a_unit().plan(), store, {}, *transport);
    for (int s = 0; s < static_cast<int>(store.slots().size()); ++s) {
      const int matrix = store.slots()[s].matrix;
      sharded.add(s, has(matrix, tp) ? piece_of(matrix, tp) : at::Tensor());
    }
    run(sharded);
    for (const auto& [s, piece, led_here] : sharded.results()) {
      const int matrix = store.slots()[s].matrix;
      led += led_here;
      ASSERT_EQ(piece.defined(), has(matrix, tp));
      if (!piece.defined()) continue;
      EXPECT_TRUE(piece.equal(expected_pieces(matrix, has)[tp])) << matrix;
    }
  });
  return led;
}

TEST(ShardedNewtonSchulz, GivesTheBitsOfTheKernelsOnEveryRank) {
  EXPECT_EQ(expect_the_kernels_pieces([](int, int) { return true; }), 4);
}

TEST(ShardedNewtonSchulz, LeavesOutTheRanksThatHaveNoShard) {
  EXPECT_EQ(expect_the_kernels_pieces([](int matrix, int tp) { return matrix != 1 || tp != 1; }),
            4);
}

TEST(ShardedNewtonSchulz, DoesNothingForAMatrixOfWhichNoRankHasAShard) {
  EXPECT_EQ(expect_the_kernels_pieces([](int matrix, int) { return matrix != 1; }), 3);
}

Matrix matrix_of(int64_t batch, int64_t rows, int64_t cols) {
  return {.batch = batch, .rows = rows, .cols = cols};
}

TEST(CutDim, IsWhatNewtonSchulzSees) {
  EXPECT_THAT(cut_dim(matrix_of(1, 8, 6), {.dim = 0, .sizes = {8, 6}}), Optional(CutDim::rows));
  EXPECT_THAT(cut_dim(matrix_of(1, 8, 6), {.dim = 1, .sizes = {8, 6}}), Optional(CutDim::cols));
  // A convolution: what follows the first dim is columns.
  EXPECT_THAT(cut_dim(matrix_of(1, 8, 27), {.dim = 2, .sizes = {8, 3, 3, 3}}),
              Optional(CutDim::cols));
  EXPECT_THAT(cut_dim(matrix_of(4, 8, 6), {.dim = 1, .sizes = {4, 8, 6}}), Optional(CutDim::rows));
  EXPECT_THAT(cut_dim(matrix_of(4, 8, 6), {.dim = 2, .sizes = {4, 8, 6}}), Optional(CutDim::cols));
}

TEST(CutDim, IsNoneWhereWholeMatricesLieOnDifferentRanks) {
  EXPECT_THAT(cut_dim(matrix_of(4, 8, 6), {.dim = 0, .sizes = {4, 8, 6}}), Eq(std::nullopt));
  EXPECT_THAT(cut_dim(matrix_of(1, 8, 6), {}), Eq(std::nullopt));
}

TEST(StaysInShards, FollowsThePolicy) {
  const Matrix large = matrix_of(1, 8, 1000), small = matrix_of(1, 8, 8);
  const TpLayout large_cut = cut_evenly({8, 1000}, 1, 4), small_cut = cut_evenly({8, 8}, 1, 4);
  EXPECT_FALSE(stays_in_shards(large, large_cut, 4, {}, ShardedGram::never));
  EXPECT_TRUE(stays_in_shards(large, large_cut, 4, {}, ShardedGram::beneficial));
  EXPECT_FALSE(stays_in_shards(small, small_cut, 4, {}, ShardedGram::beneficial));
  EXPECT_TRUE(stays_in_shards(small, small_cut, 4, {}, ShardedGram::always));
  EXPECT_FALSE(stays_in_shards(large, {}, 4, {}, ShardedGram::always));
}

// What the ring has counted, on all ranks; each message has a flag behind it.
int64_t sent_floats(const std::function<void(const UnitStore&, Transport&)>& body) {
  SimWorld world(kTps);
  std::atomic<int64_t> sent = 0;
  run_ranks(kTps, [&](int tp) {
    FlightRing ring;
    const auto transport = world.transport(tp, "main", &ring);
    const UnitStore store = a_unit().store({.tp = tp});
    body(store, *transport);
    sent += ring.total_sent_bytes() / static_cast<int64_t>(sizeof(float));
  });
  return sent;
}

TpBytes all_bytes() {
  TpBytes all;
  for (int m = 0; m < 4; ++m) {
    const TpBytes one =
        tp_bytes(a_unit().plan().matrices[m], layout_of(m), a_unit().plan().tp_owners[m], kTps, {});
    all.whole += one.whole, all.in_shards += one.in_shards;
  }
  return all;
}

TEST(TpBytesOfAStep, AreWhatMovesInShards) {
  const int64_t sent = sent_floats([](const UnitStore& store, Transport& transport) {
    ShardedNewtonSchulz sharded(a_unit().plan(), store, {}, transport);
    for (int s = 0; s < 4; ++s) {
      sharded.add(s, piece_of(store.slots()[s].matrix, transport.rank()));
    }
    run(sharded);
  });
  const int64_t flags = 4 * 2 * (kTps - 1) * sharded_gram_rounds({});
  EXPECT_EQ(4 * (sent - flags), all_bytes().in_shards);
}

TEST(TpBytesOfAStep, AreWhatMovesWhole) {
  const int64_t sent = sent_floats([](const UnitStore& store, Transport& transport) {
    Staging staging;
    std::vector<at::Tensor> pieces;
    for (const Slot& slot : store.slots()) {
      pieces.push_back(piece_of(slot.matrix, transport.rank()));
    }
    UpdateScatter(store, gather_gradients(store, pieces, transport, staging), transport, staging)
        .finish();
  });
  const int64_t flags = 4 * 2 * (kTps - 1);
  EXPECT_EQ(4 * (sent - flags), all_bytes().whole);
}

}  // namespace
}  // namespace dmuon

#include "engine/reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include <set>

#include "tests/support/tiny_unit.h"

namespace dmuon {
namespace {

using namespace testing;

constexpr int kCells = 4;

// Two replicas of two shards. Cells 0, 1 and 3 own one matrix each, cell 2 none.
const TinyUnit& a_unit() {
  static const TinyUnit unit(
      {.shard = 2, .replicate = 2},
      {{"a", {3, 5}, {}, 0, 3}, {"b", {4, 2}, {}, 0, 0}, {"c", {2, 2}, {}, 0, 1}});
  return unit;
}

std::vector<int64_t> sizes_of(int matrix) {
  const Matrix& shape = a_unit().plan().matrices[matrix];
  return {shape.rows, shape.cols};
}

using Missing = std::set<std::pair<int, int>>;  // cell, matrix

at::Tensor gradient_of(int cell, int matrix, const Missing& missing) {
  if (missing.contains({cell, matrix})) return {};
  return some_integers(sizes_of(matrix), 10 * matrix + cell);
}

at::Tensor mean_of(int matrix, const Missing& missing) {
  at::Tensor sum;
  for (int cell = 0; cell < kCells; ++cell) {
    const at::Tensor gradient = gradient_of(cell, matrix, missing);
    if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
  }
  return sum.defined() ? sum / kCells : sum;
}

// Expects the mean on the owner of each matrix, and nothing elsewhere.
void expect_means(const Missing& missing, at::ScalarType dtype = at::kFloat) {
  SimWorld world(kCells);
  run_ranks(kCells, [&](int cell) {
    const TinyGrid grid(a_unit().plan().mesh, kCells, cell);
    const UnitStore store = a_unit().store(grid.position());
    const auto shard = world.transport(cell, {"shard", grid.shards()});
    const auto replicate = world.transport(cell, {"replicate", grid.replicas()});
    std::vector<at::Tensor> gradients;
    for (const Slot& slot : store.slots()) {
      gradients.push_back(gradient_of(cell, slot.matrix, missing));
    }
    Reduction reduction(store, std::move(gradients), dtype, kCells);
    reduction.start(*shard);
    reduction.finish(replicate.get());
    for (int s = 0; s < static_cast<int>(store.slots().size()); ++s) {
      const int matrix = store.slots()[s].matrix;
      const at::Tensor got = reduction.result(s), expected = mean_of(matrix, missing);
      const bool owned = a_unit().plan().owners[matrix] == cell;
      ASSERT_EQ(got.defined(), owned && expected.defined()) << cell << ' ' << matrix;
      EXPECT_TRUE(!got.defined() || got.equal(expected));
    }
  });
}

TEST(Reduction, BringsTheMeanOverBothAxesToTheOwner) { expect_means({}); }

TEST(Reduction, CountsAMissingGradientAsZero) {
  expect_means({{0, 0}, {3, 0}, {1, 1}, {2, 1}, {3, 1}});
}

TEST(Reduction, TakesWhatOnlyAnotherReplicaHas) { expect_means({{2, 0}, {3, 0}, {0, 1}, {1, 1}}); }

TEST(Reduction, BringsNothingWhereNoRankHasAGradient) {
  expect_means({{0, 1}, {1, 1}, {2, 1}, {3, 1}});
}

// The sums of these integers are exact in bfloat16.
TEST(Reduction, SumsWhateverDtypeTravelsInFloat32) { expect_means({{1, 0}}, at::kBFloat16); }

TEST(Reduction, GivesEachGradientAVersionOfItsOwn) {
  const TinyUnit unit({}, {{"a", {2, 2}}, {"b", {2, 2}}});
  SimWorld world(1);
  const auto transport = world.transport(0);
  const UnitStore store = unit.store({});
  Reduction reduction(store, {some_integers({2, 2}, 1), some_integers({2, 2}, 2)}, at::kFloat, 1);
  reduction.start(*transport);
  reduction.finish(nullptr);
  const at::Tensor a = reduction.result(0), b = reduction.result(1);
  a.mul_(2);
  EXPECT_EQ(a._version(), 1);
  EXPECT_EQ(b._version(), 0);
}

TEST(Reduction, TakesTheEmptyShardOfATpRank) {
  const TinyUnit unit({.shard = 2, .tp = 2}, {{"a", {4, 3}, cut_in_pieces({4, 3}, 0, {4, 0})}});
  SimWorld world(2);
  run_ranks(2, [&](int rank) {
    const auto transport = world.transport(rank);
    const UnitStore store = unit.store({.shard = rank, .tp = 1});
    Reduction reduction(store, {at::full({0, 3}, 1.0f)}, at::kFloat, 2);
    reduction.start(*transport);
    reduction.finish(nullptr);
    EXPECT_EQ(reduction.result(0).defined(), rank == 0);
    EXPECT_TRUE(rank != 0 || reduction.result(0).sizes() == at::IntArrayRef({0, 3}));
  });
}

// In float32 the three add up to 0 in rank order and to 1 in another.
TEST(SummingExchange, SumsInRankOrderWhoeverReceives) {
  constexpr float kValues[] = {1e8f, 1, -1e8f};
  SimWorld world(3);
  run_ranks(3, [&](int rank) {
    const auto transport = world.transport(rank);
    const std::vector<int64_t> counts{2, 0, 3};
    SummingExchange exchange(*transport, counts, at::TensorOptions().dtype(at::kFloat), "unit",
                             [&](int r, at::Tensor packed, int64_t offset) {
                               packed.narrow(0, offset, counts[r]).fill_(kValues[rank]);
                             });
    const at::Tensor sum = exchange.finish(1);
    EXPECT_TRUE(sum.equal(at::full({counts[rank]}, 0.0f)));
  });
}

}  // namespace
}  // namespace dmuon

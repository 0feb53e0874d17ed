#include "engine/plan.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>

#include "engine/error.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

Matrix matrix(const std::string& name, int64_t rows, int64_t cols, const std::string& unit = "") {
  return {.name = name,
          .unit = unit,
          .layer = unit,
          .rows = rows,
          .cols = cols,
          .state_bytes = 8 * rows * cols};
}

std::vector<Matrix> gpt(int layers, int64_t d) {
  std::vector<Matrix> list;
  for (int i = 0; i < layers; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    list.push_back(matrix(block + ".qkv.weight", 3 * d, d, block));
    list.push_back(matrix(block + ".proj.weight", d, d, block));
    list.push_back(matrix(block + ".fc.weight", 4 * d, d, block));
    list.push_back(matrix(block + ".out.weight", d, 4 * d, block));
  }
  return list;
}

std::vector<std::string> names(const std::vector<Matrix>& matrices) {
  std::vector<std::string> result;
  for (const Matrix& m : matrices) result.push_back(m.name);
  return result;
}

std::vector<std::string> names(const OwnershipPlan& plan, const Segment& segment) {
  std::vector<std::string> result;
  for (int32_t i : segment.matrices) result.push_back(plan.matrices[i].name);
  return result;
}

void expect_config_error(std::vector<Matrix> matrices, const Mesh& mesh, const PlanPolicy& policy,
                         const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_THAT([&] { make_plan(matrices, mesh, policy); },
                ThrowsMessage<ConfigError>(HasSubstr(part)));
  }
}

constexpr PlanPolicy kWholeProducts{.symmetric_products = false};

TEST(NewtonSchulzFlops, AreThoseOfGramOnTriangles) {
  const Matrix m = matrix("w", 1000, 300), small = matrix("w", 100, 30);
  EXPECT_EQ(newton_schulz_flops(m, {}), 3.0 * 300 * 300 * 1000 + 17.0 * 300 * 300 * 300);
  EXPECT_EQ(newton_schulz_flops(small, {}), 6.0 * 30 * 30 * 100 + 14.0 * 30 * 30 * 30);
  EXPECT_EQ(newton_schulz_flops(small, kWholeProducts), 8.0 * 30 * 30 * 100 + 28.0 * 30 * 30 * 30);
}

TEST(NewtonSchulzFlops, CountTheProductsOfOtherStepNumbers) {
  const Matrix wide = matrix("w", 200, 1000);  // X X^T: 4e7 operations, Q X twice that, R R: 8e6
  // One step: X X^T, R R, Q X. Each later one: four more of Z and R. After five: a restart, and
  // one of the four.
  EXPECT_EQ(newton_schulz_flops(wide, {.ns_steps = 1}), 12e7 + 8e6);
  EXPECT_EQ(newton_schulz_flops(wide, {.ns_steps = 2}), 12e7 + 5 * 8e6);
  EXPECT_EQ(newton_schulz_flops(wide, {.ns_steps = 5}), 12e7 + 17 * 8e6);
  EXPECT_EQ(newton_schulz_flops(wide, {.ns_steps = 6}), 2 * 12e7 + 18 * 8e6);
}

TEST(NewtonSchulzFlops, OfWholeProductsRestartBeforeTheThirdStep) {
  const Matrix wide = matrix("w", 10, 100);
  PlanPolicy policy = kWholeProducts;
  policy.ns_steps = 2;
  EXPECT_EQ(newton_schulz_flops(wide, policy), 2 * 20000 + 5 * 2000);
  policy.ns_steps = 3;
  EXPECT_EQ(newton_schulz_flops(wide, policy), 4 * 20000 + 6 * 2000);
}

TEST(NewtonSchulzFlops, AreThoseOfTheDirectIterationWhereThatCostsLess) {
  const Matrix square = matrix("w", 10, 10), m = matrix("w", 10, 20);
  EXPECT_EQ(newton_schulz_flops(square, {}), newton_schulz_flops(square, {.direct = true}));
  EXPECT_EQ(newton_schulz_flops(m, {.direct = true}), 5 * (3.0 * 2000 + 1000));
  EXPECT_EQ(newton_schulz_flops(m, {.symmetric_products = false, .direct = true}),
            5 * (4.0 * 2000 + 2.0 * 1000));
}

TEST(NewtonSchulzCost, ExceedsTheFlopsByLessTheLargerTheMatrix) {
  double before = 100;
  for (int64_t order : {8, 64, 512, 4096}) {
    const Matrix m = matrix("w", order, 4 * order);
    const double excess = newton_schulz_cost(m, {}) / newton_schulz_flops(m, {}) - 1;
    EXPECT_GT(excess, 0) << order;
    EXPECT_LT(excess, before) << order;
    before = excess;
  }
  EXPECT_LT(before, 0.02);
}

TEST(NewtonSchulzCost, IsAWholeNumber) {
  for (auto [rows, cols] : {std::pair{7, 90}, {129, 130}, {1, 1}, {4096, 14336}}) {
    const double cost = newton_schulz_cost(matrix("w", rows, cols), {});
    EXPECT_EQ(cost, std::round(cost)) << rows;
  }
}

TEST(NewtonSchulzCost, DoesNotDependOnOrientationAndGrowsWithTheBatch) {
  Matrix wide = matrix("w", 7, 90), tall = matrix("w", 90, 7);
  EXPECT_EQ(newton_schulz_cost(wide, {}), newton_schulz_cost(tall, {}));
  Matrix batch = wide;
  batch.batch = 16;
  EXPECT_EQ(newton_schulz_cost(batch, {}), 16 * newton_schulz_cost(wide, {}));
}

TEST(NewtonSchulzCost, OfAnEmptyMatrixIsZero) {
  EXPECT_EQ(newton_schulz_cost(matrix("w", 0, 5), {}), 0);
  EXPECT_EQ(newton_schulz_cost(matrix("w", 5, 0), {}), 0);
}

TEST(NewtonSchulzCost, IsLinearInTheElementsOnTheAdamwRoute) {
  Matrix m = matrix("bias", 64, 32);
  m.route = Route::adamw;
  const double cost = newton_schulz_cost(m, {});
  EXPECT_GT(cost, 0);
  m.rows *= 3;
  EXPECT_EQ(newton_schulz_cost(m, {}), 3 * cost);
  EXPECT_EQ(newton_schulz_cost(m, {.ns_steps = 9, .symmetric_products = false}), 3 * cost);
}

TEST(Plan, IsTheSameForEveryOrderOfTheMatrices) {
  std::vector<Matrix> list = gpt(13, 64);
  list.push_back(matrix("blocks.1.extra", 7, 0, "blocks.1"));
  for (int64_t ranks : {1, 3, 8, 100}) {
    const OwnershipPlan plan = make_plan(list, {.shard = ranks}, {});
    std::mt19937 random(17);
    for (int i = 0; i < 5; ++i) {
      std::shuffle(list.begin(), list.end(), random);
      const OwnershipPlan other = make_plan(list, {.shard = ranks}, {});
      EXPECT_EQ(names(other.matrices), names(plan.matrices));
      EXPECT_EQ(other.owners, plan.owners);
      EXPECT_EQ(other.digest, plan.digest);
      EXPECT_EQ(other.costs, plan.costs);
      EXPECT_EQ(other.state_bytes(), plan.state_bytes());
    }
  }
}

TEST(Plan, SortsMatricesAndUnitsByName) {
  const OwnershipPlan plan = make_plan(
      {matrix("z", 2, 2, "b"), matrix("a", 2, 2, "c"), matrix("m", 2, 2, "a")}, {.shard = 2}, {});
  EXPECT_THAT(names(plan.matrices), ElementsAre("a", "m", "z"));
  EXPECT_THAT(plan.units, SizeIs(3));
  EXPECT_EQ(plan.units[0].name + plan.units[1].name + plan.units[2].name, "abc");
}

TEST(Plan, PacksTheMatricesOfOneOwnerByOwnerThenName) {
  std::vector<Matrix> list = {matrix("d", 4, 4, "u"), matrix("c", 4, 4, "u"),
                              matrix("b", 4, 4, "u"), matrix("a", 4, 4, "u"),
                              matrix("e", 4, 4, "v")};
  const OwnershipPlan plan =
      make_plan(list, {.shard = 2}, {.strategy = OwnerStrategy::round_robin});
  const std::vector<Segment>& segments = plan.units[0].segments;
  ASSERT_THAT(segments, SizeIs(2));
  EXPECT_EQ(segments[0].owner, 0);
  EXPECT_THAT(names(plan, segments[0]), ElementsAre("a", "c"));
  EXPECT_EQ(segments[1].owner, 1);
  EXPECT_THAT(names(plan, segments[1]), ElementsAre("b", "d"));
}

TEST(Plan, GivesEachMatrixASegmentByNameWhenNotPacked) {
  const OwnershipPlan plan = make_plan(gpt(3, 8), {.shard = 2}, {.pack = false});
  for (const Unit& unit : plan.units) {
    ASSERT_THAT(unit.segments, SizeIs(4));
    for (size_t i = 0; i < 4; ++i) {
      ASSERT_THAT(unit.segments[i].matrices, SizeIs(1));
      EXPECT_EQ(unit.segments[i].owner, plan.owners[unit.segments[i].matrices[0]]);
      if (i > 0) {
        EXPECT_LT(names(plan, unit.segments[i - 1]), names(plan, unit.segments[i]));
      }
    }
  }
}

TEST(Plan, PutsEveryMatrixIntoOneSegmentOfItsOwner) {
  for (bool pack : {true, false}) {
    const OwnershipPlan plan = make_plan(gpt(20, 16), {.shard = 4, .replicate = 3}, {.pack = pack});
    std::multiset<int32_t> seen;
    for (const Unit& unit : plan.units) {
      for (const Segment& segment : unit.segments) {
        for (int32_t i : segment.matrices) {
          seen.insert(i);
          EXPECT_EQ(plan.owners[i], segment.owner);
          EXPECT_EQ(plan.matrices[i].unit, unit.name);
        }
      }
    }
    EXPECT_EQ(seen.size(), 80u);
    EXPECT_EQ(std::set<int32_t>(seen.begin(), seen.end()).size(), 80u);
  }
}

TEST(Plan, UsesAllSlotsOfShardTimesReplicate) {
  const OwnershipPlan plan = make_plan(gpt(6, 8), {.shard = 4, .replicate = 6}, {});
  EXPECT_EQ(std::set<int32_t>(plan.owners.begin(), plan.owners.end()).size(), 24u);
  EXPECT_EQ(plan.owners, make_plan(gpt(6, 8), {.shard = 24}, {}).owners);
}

TEST(Plan, GivesTheMatricesOfABlockDifferentOwnersWhereItCostsNothing) {
  const OwnershipPlan plan = make_plan(gpt(12, 64), {.shard = 48}, {});
  for (const Unit& unit : plan.units) EXPECT_THAT(unit.segments, SizeIs(4)) << unit.name;
  const OwnershipPlan small = make_plan(gpt(12, 64), {.shard = 8}, {});
  for (const Unit& unit : small.units) EXPECT_THAT(unit.segments, SizeIs(4)) << unit.name;
}

TEST(Plan, FindsNames) {
  const OwnershipPlan plan = make_plan(gpt(4, 8), {.shard = 2}, {});
  for (size_t i = 0; i < plan.matrices.size(); ++i) {
    EXPECT_EQ(plan.find(plan.matrices[i].name), static_cast<int32_t>(i));
  }
  EXPECT_EQ(plan.find("blocks.0"), -1);
  EXPECT_EQ(plan.find(""), -1);
  EXPECT_EQ(plan.find("zzz"), -1);
}

TEST(Plan, ReportsItsLoads) {
  const std::vector<Matrix> list = {matrix("a", 10, 10), matrix("b", 10, 10), matrix("c", 20, 20)};
  const OwnershipPlan plan = make_plan(list, {.shard = 4}, {});
  const double small = newton_schulz_cost(list[0], {}), large = newton_schulz_cost(list[2], {});
  EXPECT_THAT(plan.costs, ElementsAre(small, small, large));
  EXPECT_THAT(plan.loads(), ElementsAre(large, small, small, 0));
  EXPECT_THAT(plan.state_bytes(), ElementsAre(3200, 800, 800, 0));
  EXPECT_EQ(plan.report.max_load, large);
  EXPECT_EQ(plan.report.mean_load, (large + 2 * small) / 4);
  EXPECT_EQ(plan.report.w_star, (large + 2 * small) / large);
  EXPECT_EQ(plan.report.lower_bound, large);
  EXPECT_EQ(plan.report.max_state_bytes, 3200);
}

TEST(Plan, BoundsTheStateOfEveryOwner) {
  for (int64_t ranks : {1, 5, 64}) {
    const PlanReport report = make_plan(gpt(24, 32), {.shard = ranks}, {}).report;
    EXPECT_LE(report.max_state_bytes, report.state_bytes_bound);
    EXPECT_LE(report.state_bytes_bound, 24 * 12 * 32 * 32 * 8);
  }
  const PlanPolicy policy{.memory_limit_bytes = 10 * 32 * 32 * 8};
  EXPECT_EQ(make_plan(gpt(2, 32), {.shard = 4}, policy).report.state_bytes_bound,
            policy.memory_limit_bytes);
}

TEST(Plan, BalancesWhatThePolicySays) {
  // A thin matrix has as many elements as the square one, and a fraction of its cost.
  const std::vector<Matrix> list = {matrix("square", 64, 64), matrix("thin1", 4, 1024),
                                    matrix("thin2", 4, 1024), matrix("thin3", 4, 1024)};
  const OwnershipPlan by_cost = make_plan(list, {.shard = 2}, {});
  EXPECT_EQ(std::count(by_cost.owners.begin(), by_cost.owners.end(), by_cost.owners[0]), 1);
  const OwnershipPlan by_numel = make_plan(list, {.shard = 2}, {.cost_model = CostModel::numel});
  EXPECT_EQ(std::count(by_numel.owners.begin(), by_numel.owners.end(), by_numel.owners[0]), 2);
  EXPECT_EQ(by_numel.costs, by_cost.costs);
}

TEST(Plan, AcceptsEmptyMatrices) {
  const OwnershipPlan plan =
      make_plan({matrix("a", 0, 5), matrix("b", 5, 0), matrix("c", 0, 0)}, {.shard = 2}, {});
  EXPECT_EQ(plan.report.max_load, 0);
  EXPECT_EQ(plan.report.w_star, 0);
  EXPECT_EQ(plan.report.lower_bound, 0);
}

TEST(Plan, CoversTenThousandRanks) {
  for (const Mesh& mesh : {Mesh{.shard = 10'000}, Mesh{.shard = 1'250, .replicate = 8}}) {
    const OwnershipPlan plan = make_plan(gpt(5'000, 1'024), mesh, {});
    const std::vector<double> loads = plan.loads();
    EXPECT_THAT(loads, SizeIs(10'000));
    EXPECT_THAT(loads, Each(::testing::Gt(0)));
    EXPECT_LE(plan.report.lower_bound, plan.report.max_load);
    EXPECT_LE(plan.report.max_load, 1.5 * plan.report.lower_bound);  // LPT's own guarantee is 4/3
  }
}

// Every field of the input that reaches a collective or an owner, changed one at a time.
TEST(PlanDigest, SeesEveryField) {
  const std::vector<Matrix> list = gpt(2, 8);
  const Mesh mesh{.shard = 4, .replicate = 1};
  std::set<std::string> seen{make_plan(list, mesh, {}).digest.hex()};
  size_t expected = 1;
  auto expect_new = [&](const OwnershipPlan& plan, const char* what) {
    seen.insert(plan.digest.hex());
    EXPECT_EQ(seen.size(), ++expected) << what;
  };
  const std::vector<std::pair<const char*, std::function<void(Matrix&)>>> matrix_changes = {
      {"name", [](Matrix& m) { m.name += "x"; }},
      {"unit", [](Matrix& m) { m.unit += "x"; }},
      {"layer", [](Matrix& m) { m.layer += "x"; }},
      {"no layer", [](Matrix& m) { m.layer = ""; }},
      {"batch", [](Matrix& m) { m.batch = 2; }},
      {"rows", [](Matrix& m) { m.rows += 1; }},
      {"cols", [](Matrix& m) { m.cols += 1; }},
      {"transposed", [](Matrix& m) { std::swap(m.rows, m.cols); }},
      {"state_bytes", [](Matrix& m) { m.state_bytes += 1; }},
      {"route", [](Matrix& m) { m.route = Route::adamw; }},
      {"dtype", [](Matrix& m) { m.dtype = "bfloat16"; }}};
  for (const auto& [what, change] : matrix_changes) {
    for (size_t i : {size_t{0}, list.size() - 1}) {
      std::vector<Matrix> changed = list;
      change(changed[i]);
      expect_new(make_plan(changed, mesh, {}), what);
    }
  }
  expect_new(make_plan(list, {.shard = 5, .replicate = 1}, {}), "shard");
  expect_new(make_plan(list, {.shard = 2, .replicate = 2}, {}), "replicate");
  expect_new(make_plan(list, {.shard = 1, .replicate = 4}, {}), "axes swapped");
  const std::vector<std::pair<const char*, PlanPolicy>> policies = {
      {"strategy", {.strategy = OwnerStrategy::round_robin}},
      {"cost model", {.cost_model = CostModel::numel}},
      {"owner limit", {.max_owners_per_group = 4}},
      {"memory limit", {.memory_limit_bytes = 1'000'000}},
      {"pack", {.pack = false}},
      {"ns_steps", {.ns_steps = 6}},
      {"symmetric products", {.symmetric_products = false}},
      {"direct", {.direct = true}}};
  for (const auto& [what, policy] : policies) expect_new(make_plan(list, mesh, policy), what);
  std::vector<Matrix> shorter(list.begin(), list.end() - 1);
  expect_new(make_plan(shorter, mesh, {}), "a matrix less");
}

TEST(PlanErrors, NameAnEmptyList) {
  expect_config_error({}, {.shard = 2}, {}, {"no matrices", "at least one parameter"});
}

TEST(PlanErrors, NameTheDuplicate) {
  expect_config_error({matrix("w", 2, 2, "a"), matrix("v", 2, 2, "a"), matrix("w", 2, 2, "b")},
                      {.shard = 2}, {}, {"'w' is listed twice", "tied weight"});
}

TEST(PlanErrors, NameTheNegativeSize) {
  expect_config_error({matrix("v", 2, 2), matrix("w", 2, -3)}, {.shard = 2}, {},
                      {"'w' is 1 x 2 x -3", "below 0"});
  Matrix batch = matrix("w", 2, 2);
  batch.batch = -1;
  expect_config_error({batch}, {.shard = 2}, {}, {"'w' is -1 x 2 x 2"});
  Matrix bytes = matrix("w", 2, 2);
  bytes.state_bytes = -8;
  expect_config_error({bytes}, {.shard = 2}, {}, {"'w' has state_bytes = -8"});
}

TEST(PlanErrors, NameTheMeshAxis) {
  expect_config_error(gpt(1, 2), {.shard = 0, .replicate = 2}, {}, {"0 (shard) x 2", "at least 1"});
  expect_config_error(gpt(1, 2), {.shard = 2, .replicate = -1}, {}, {"2 (shard) x -1"});
  const int64_t huge = std::numeric_limits<int64_t>::max();
  expect_config_error(gpt(1, 2), {.shard = huge, .replicate = huge}, {},
                      {"at most 16777216 ranks"});
}

TEST(PlanErrors, NameThePolicyField) {
  expect_config_error(gpt(1, 2), {.shard = 2}, {.max_owners_per_group = -1},
                      {"max_owners_per_group is -1", "0 for no limit"});
  expect_config_error(gpt(1, 2), {.shard = 2}, {.memory_limit_bytes = -5},
                      {"memory_limit_bytes is -5"});
  expect_config_error(gpt(1, 2), {.shard = 2}, {.ns_steps = 0}, {"ns_steps is 0", "at least 1"});
}

TEST(PlanErrors, NameTheMemoryLimitThatNothingKeeps) {
  expect_config_error(
      gpt(2, 8), {.shard = 2}, {.memory_limit_bytes = 6143},
      {"memory_limit_bytes is 6143", "all together 12288 on 2 ranks", "at least 6144"});
}

// Ranks that register in another order must raise the same text.
TEST(PlanErrors, AreTheSameForEveryOrder) {
  const Matrix a = matrix("a", -1, 2), b = matrix("b", 2, -1);
  for (const std::vector<Matrix>& list : {std::vector{a, b}, std::vector{b, a}}) {
    expect_config_error(list, {.shard = 2}, {}, {"'a' is 1 x -1 x 2"});
  }
}

TEST(LayerOf, IsTheChildOfTheOutermostContainer) {
  EXPECT_EQ(layer_of("net.blocks.3.mlp.fc.weight", {"net.blocks", "net.blocks.3.mlp"}),
            "net.blocks.3");
  EXPECT_EQ(layer_of("net.blocks.3.mlp.fc.weight", {"net.blocks.3.mlp", "net.blocks"}),
            "net.blocks.3");
  EXPECT_EQ(layer_of("encoder.stages.1.blocks.2.w", {"encoder.stages", "encoder.stages.1.blocks"}),
            "encoder.stages.1");
}

TEST(LayerOf, KnowsTheRootAsAContainer) { EXPECT_EQ(layer_of("0.weight", {""}), "0"); }

TEST(LayerOf, IsEmptyOutsideContainers) {
  EXPECT_EQ(layer_of("embed.weight", {"blocks"}), "");
  EXPECT_EQ(layer_of("blocks_extra.3.weight", {"blocks"}), "");
  EXPECT_EQ(layer_of("blocks.weight", {"blocks"}), "");  // the container's own parameter
  EXPECT_EQ(layer_of("weight", {""}), "");
  EXPECT_EQ(layer_of("blocks.3.weight", {}), "");
}

}  // namespace
}  // namespace dmuon

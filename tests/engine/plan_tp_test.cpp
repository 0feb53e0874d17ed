// The tensor-parallel axis of the plan.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <random>
#include <set>

#include "engine/error.h"
#include "engine/plan.h"
#include "tests/engine/makespan.h"

namespace dmuon {
namespace {

using testing::best_makespan;
using testing::largest;
using testing::lpt_makespan;

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

constexpr double kRounding = 1e-10;  // relative: sums of up to 1e5 doubles in two orders

struct Shape {
  int64_t rows = 0, cols = 0;
};

Matrix matrix(const std::string& name, Shape shape, const std::string& unit, int64_t tp = 1) {
  const int64_t numel = shape.rows * shape.cols;
  return {.name = name,
          .unit = unit,
          .layer = unit,
          .rows = shape.rows,
          .cols = shape.cols,
          .state_bytes = 4 * numel,
          .shard_bytes = 4 * ((shape.rows + tp - 1) / tp) * shape.cols};
}

std::vector<Matrix> gpt(int layers, int64_t d, int64_t tp) {
  std::vector<Matrix> list;
  for (int i = 0; i < layers; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    list.push_back(matrix(block + ".qkv", {3 * d, d}, block, tp));
    list.push_back(matrix(block + ".proj", {d, d}, block, tp));
    list.push_back(matrix(block + ".fc", {4 * d, d}, block, tp));
    list.push_back(matrix(block + ".out", {d, 4 * d}, block, tp));
  }
  return list;
}

// About one in eight on the adamw route, if any.
std::vector<Matrix> random_list(std::mt19937_64& random, int size, int64_t tp, bool adamw) {
  std::vector<Matrix> list;
  for (int i = 0; i < size; ++i) {
    const Shape shape{static_cast<int64_t>(1 + random() % 300),
                      static_cast<int64_t>(1 + random() % 300)};
    const std::string unit = "u" + std::to_string(i / 6);
    list.push_back(matrix(unit + "." + std::to_string(i % 6), shape, unit, tp));
    if (adamw && random() % 8 == 0) list.back().route = Route::adamw;
  }
  return list;
}

std::vector<double>& cheapest_cell(std::vector<std::vector<double>>& cells) {
  return *std::min_element(cells.begin(), cells.end(),
                           [](const auto& a, const auto& b) { return largest(a) < largest(b); });
}

// Of equal ones the first of each cell come first, then the second, as slots are numbered.
double& cheapest_rank(std::vector<std::vector<double>>& cells) {
  double* cheapest = &cells[0][0];
  for (size_t rank = 0; rank < cells[0].size(); ++rank) {
    for (std::vector<double>& cell : cells) {
      if (cell[rank] < *cheapest) cheapest = &cell[rank];
    }
  }
  return *cheapest;
}

// LPT where a matrix of the adamw route costs every rank of its cell a share.
double mixed_lpt_makespan(const OwnershipPlan& plan) {
  const int64_t tp = plan.mesh.tp;
  std::vector<std::pair<double, bool>> items;
  for (size_t i = 0; i < plan.matrices.size(); ++i) {
    const bool shared = plan.matrices[i].route == Route::adamw;
    items.emplace_back(plan.costs[i] / static_cast<double>(shared ? tp : 1), shared);
  }
  std::sort(items.rbegin(), items.rend());
  std::vector<std::vector<double>> cells(plan.mesh.cells(), std::vector<double>(tp));
  for (const auto& [cost, shared] : items) {
    if (shared) {
      for (double& load : cheapest_cell(cells)) load += cost;
    } else {
      cheapest_rank(cells) += cost;
    }
  }
  double makespan = 0;
  for (const std::vector<double>& cell : cells) makespan = std::max(makespan, largest(cell));
  return makespan;
}

// Costs of the matrices that a TP owner runs, per cell.
std::map<int32_t, std::vector<double>> costs_by_cell(const OwnershipPlan& plan) {
  std::map<int32_t, std::vector<double>> costs;
  for (size_t i = 0; i < plan.owners.size(); ++i) {
    if (plan.matrices[i].route == Route::muon) costs[plan.owners[i]].push_back(plan.costs[i]);
  }
  return costs;
}

// Load of the costliest rank of the cell, without the adamw route.
double makespan_of_cell(const OwnershipPlan& plan, int32_t cell) {
  std::vector<double> loads(plan.mesh.tp);
  for (size_t i = 0; i < plan.owners.size(); ++i) {
    const bool counts = plan.owners[i] == cell && plan.matrices[i].route == Route::muon;
    if (counts) loads[plan.tp_owners[i]] += plan.costs[i];
  }
  return largest(loads);
}

std::vector<int32_t> matrices_per_rank(const OwnershipPlan& plan) {
  std::vector<int32_t> counts(plan.mesh.ranks());
  for (size_t i = 0; i < plan.owners.size(); ++i) {
    ++counts[plan.owners[i] * plan.mesh.tp + plan.tp_owners[i]];
  }
  return counts;
}

bool idle_beside_two(const OwnershipPlan& plan) {
  const std::vector<int32_t> counts = matrices_per_rank(plan);
  return *std::min_element(counts.begin(), counts.end()) == 0 && largest(counts) > 1;
}

std::set<int32_t> cells_of(const OwnershipPlan& plan) {
  return {plan.owners.begin(), plan.owners.end()};
}

TEST(PlanTp, BalancesOverAllRanksOfTheJob) {
  for (const Mesh& mesh : {Mesh{.shard = 8, .tp = 4}, Mesh{.shard = 4, .replicate = 2, .tp = 4},
                           Mesh{.shard = 2, .replicate = 8, .tp = 2}, Mesh{.tp = 32}}) {
    const OwnershipPlan plan = make_plan(gpt(24, 64, mesh.tp), mesh, {});
    const OwnershipPlan flat = make_plan(gpt(24, 64, 1), {.shard = 32}, {});
    EXPECT_THAT(plan.loads(), SizeIs(32));
    EXPECT_EQ(plan.report.max_load, flat.report.max_load);
    EXPECT_EQ(plan.report.max_load, largest(plan.loads()));
    EXPECT_EQ(plan.report.mean_load, flat.report.mean_load);
    EXPECT_FALSE(idle_beside_two(plan));
  }
}

struct Job {
  Mesh mesh;
  int matrices = 0;
  bool adamw = false;
};

class PlanTpMany : public ::testing::TestWithParam<Job> {
 protected:
  std::vector<OwnershipPlan> plans() {
    std::mt19937_64 random(11);
    std::vector<OwnershipPlan> result;
    const auto& [mesh, size, adamw] = GetParam();
    for (int i = 0; i < 8; ++i) {
      result.push_back(make_plan(random_list(random, size, mesh.tp, adamw), mesh, {}));
    }
    return result;
  }
};

TEST_P(PlanTpMany, IsNeverWorseThanLptInTheJobOrInACell) {
  for (const OwnershipPlan& plan : plans()) {
    // Where a whole cell works on a matrix, a rank may have that one and its own.
    if (!GetParam().adamw) {
      EXPECT_FALSE(idle_beside_two(plan));
    }
    EXPECT_LE(plan.report.max_load, mixed_lpt_makespan(plan) * (1 + kRounding));
    EXPECT_GE(plan.report.max_load, plan.report.lower_bound * (1 - kRounding));
    for (const auto& [cell, costs] : costs_by_cell(plan)) {
      EXPECT_LE(makespan_of_cell(plan, cell), lpt_makespan(costs, plan.mesh.tp) * (1 + kRounding));
    }
  }
}

TEST_P(PlanTpMany, ReportsWhatTheRanksHold) {
  for (const OwnershipPlan& plan : plans()) {
    const std::vector<double> loads = plan.loads();
    const double total = std::accumulate(plan.costs.begin(), plan.costs.end(), 0.0);
    EXPECT_NEAR(std::accumulate(loads.begin(), loads.end(), 0.0), total, total * kRounding);
    EXPECT_NEAR(plan.report.max_load, largest(loads), total * kRounding);
    EXPECT_EQ(plan.report.max_state_bytes, largest(plan.state_bytes()));
    EXPECT_LE(plan.report.max_state_bytes, plan.report.state_bytes_bound);
  }
}

TEST_P(PlanTpMany, KeepsATightMemoryLimit) {
  for (const OwnershipPlan& free : plans()) {
    const std::vector<int64_t> held = free.state_bytes();
    const int64_t mean =
        std::accumulate(held.begin(), held.end(), int64_t{0}) / static_cast<int64_t>(held.size());
    PlanPolicy policy;
    policy.memory_limit_bytes = mean + (largest(held) - mean) / 2;
    for (const Matrix& m : free.matrices) {
      policy.memory_limit_bytes =
          std::max(policy.memory_limit_bytes, m.state_bytes + m.shard_bytes + mean / 2);
    }
    const OwnershipPlan plan = make_plan(free.matrices, free.mesh, policy);
    EXPECT_LE(largest(plan.state_bytes()), policy.memory_limit_bytes);
    policy.strategy = OwnerStrategy::round_robin;  // takes matrices by name: needs more room
    policy.memory_limit_bytes += mean;
    const OwnershipPlan turns = make_plan(free.matrices, free.mesh, policy);
    EXPECT_LE(largest(turns.state_bytes()), policy.memory_limit_bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, PlanTpMany,
    ::testing::Values(Job{{.shard = 2, .tp = 2}, 9}, Job{{.shard = 2, .replicate = 2, .tp = 2}, 40},
                      Job{{.shard = 3, .tp = 4}, 60}, Job{{.shard = 1, .tp = 8}, 100},
                      Job{{.shard = 10, .replicate = 5, .tp = 2}, 80},
                      Job{{.shard = 16, .tp = 4}, 600}, Job{{.shard = 2, .tp = 3}, 20, true},
                      Job{{.shard = 4, .replicate = 2, .tp = 4}, 150, true},
                      Job{{.shard = 30, .tp = 4}, 60, true}));

TEST(PlanTp, IsOptimalInSmallCells) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 40; ++i) {
    const Mesh mesh{.shard = 3, .tp = static_cast<int64_t>(2 + random() % 2)};
    const OwnershipPlan plan = make_plan(random_list(random, 20, mesh.tp, false), mesh, {});
    for (const auto& [cell, costs] : costs_by_cell(plan)) {
      std::vector<double> loads(mesh.tp);
      EXPECT_NEAR(makespan_of_cell(plan, cell), best_makespan(costs, loads, 0),
                  plan.report.max_load * kRounding);
    }
  }
}

TEST(PlanTp, IsTheSameForEveryOrderOfTheMatrices) {
  std::mt19937_64 random(4);
  const Mesh mesh{.shard = 3, .replicate = 2, .tp = 4};
  std::vector<Matrix> list = random_list(random, 90, mesh.tp, true);
  const OwnershipPlan plan = make_plan(list, mesh, {});
  for (int i = 0; i < 5; ++i) {
    std::shuffle(list.begin(), list.end(), random);
    const OwnershipPlan other = make_plan(list, mesh, {});
    EXPECT_EQ(other.digest, plan.digest);
    EXPECT_EQ(other.owners, plan.owners);
    EXPECT_EQ(other.tp_owners, plan.tp_owners);
  }
}

TEST(PlanTp, OfSizeOneIsNoTensorParallelism) {
  std::vector<Matrix> list = gpt(7, 16, 1);
  list.back().route = Route::adamw;
  const OwnershipPlan plan = make_plan(list, {.shard = 5, .tp = 1}, {});
  EXPECT_THAT(plan.tp_owners, Each(0));
  for (Matrix& m : list) {  // the same bytes, told in one number
    m.state_bytes += m.shard_bytes;
    m.shard_bytes = 0;
  }
  const OwnershipPlan whole = make_plan(list, {.shard = 5}, {});
  EXPECT_EQ(plan.owners, whole.owners);
  EXPECT_EQ(plan.loads(), whole.loads());
  EXPECT_EQ(plan.state_bytes(), whole.state_bytes());
  EXPECT_EQ(plan.report.state_bytes_bound, whole.report.state_bytes_bound);
}

TEST(PlanTp, CountsShardsOnTheCellAndTheRestOnTheTpOwner) {
  const Matrix a{.name = "a", .rows = 10, .cols = 10, .state_bytes = 400, .shard_bytes = 7};
  const OwnershipPlan plan = make_plan({a}, {.shard = 2, .tp = 3}, {});
  EXPECT_THAT(plan.state_bytes(), ElementsAre(407, 7, 7, 0, 0, 0));
  EXPECT_THAT(plan.loads(), ElementsAre(plan.costs[0], 0, 0, 0, 0, 0));
  EXPECT_EQ(plan.report.max_state_bytes, 407);
}

TEST(PlanTp, CutsTheAdamwRouteEvenlyOverItsCell) {
  Matrix a{.name = "a", .rows = 10, .cols = 10, .state_bytes = 400, .shard_bytes = 7};
  a.route = Route::adamw;
  const OwnershipPlan plan = make_plan({a}, {.shard = 2, .tp = 3}, {});
  const double share = plan.costs[0] / 3;
  EXPECT_THAT(plan.tp_owners, ElementsAre(0));
  EXPECT_THAT(plan.loads(), ElementsAre(share, share, share, 0, 0, 0));
  EXPECT_THAT(plan.state_bytes(), ElementsAre(141, 141, 141, 0, 0, 0));  // 7 + 400 / 3, rounded up
  EXPECT_EQ(plan.report.max_load, share);
  EXPECT_EQ(plan.report.lower_bound, share);
  EXPECT_EQ(plan.report.w_star, 3);
}

TEST(PlanTp, GivesTheAdamwRouteToTheCellWhereItCostsLeast) {
  Matrix bias = matrix("bias", {64, 1}, "u", 2);
  bias.route = Route::adamw;
  const OwnershipPlan plan =
      make_plan({matrix("w", {64, 64}, "u", 2), bias}, {.shard = 2, .tp = 2}, {});
  EXPECT_NE(plan.owners[plan.find("bias")], plan.owners[plan.find("w")]);
}

TEST(PlanTp, SpreadsOverCellsBeforeItFillsThem) {
  const OwnershipPlan few = make_plan(gpt(2, 16, 4), {.shard = 8, .tp = 4}, {});
  EXPECT_THAT(cells_of(few), SizeIs(8));
  const OwnershipPlan more = make_plan(gpt(4, 16, 4), {.shard = 8, .tp = 4}, {});
  std::map<int32_t, int> count;
  for (const int32_t cell : more.owners) ++count[cell];
  for (const auto& [cell, matrices] : count) EXPECT_EQ(matrices, 2) << cell;
}

TEST(PlanTp, WorksWithMoreReplicasThanMatrices) {
  const OwnershipPlan plan = make_plan(gpt(1, 16, 2), {.replicate = 9, .tp = 2}, {});
  EXPECT_THAT(cells_of(plan), SizeIs(4));
  EXPECT_EQ(largest(matrices_per_rank(plan)), 1);
  EXPECT_EQ(plan.report.max_load, plan.report.lower_bound);
}

TEST(PlanTp, CoversTenThousandRanks) {
  for (const Mesh& mesh :
       {Mesh{.shard = 1'250, .tp = 8}, Mesh{.shard = 125, .replicate = 10, .tp = 8},
        Mesh{.shard = 2, .replicate = 1'250, .tp = 4}, Mesh{.shard = 1, .tp = 10'000}}) {
    const OwnershipPlan many = make_plan(gpt(5'000, 1'024, mesh.tp), mesh, {});
    EXPECT_THAT(many.loads(), AllOf(SizeIs(10'000), Each(::testing::Gt(0))));
    EXPECT_LE(many.report.max_load, lpt_makespan(many.costs, mesh.ranks()) * (1 + kRounding));
    const OwnershipPlan few = make_plan(gpt(12, 768, mesh.tp), mesh, {});
    EXPECT_EQ(largest(matrices_per_rank(few)), 1);
    EXPECT_EQ(few.report.max_load, few.report.lower_bound);
  }
}

TEST(PlanTp, TakesTurnsOverCellsFirst) {
  const PlanPolicy policy{.strategy = OwnerStrategy::round_robin};
  const OwnershipPlan plan = make_plan(gpt(2, 8, 2), {.shard = 3, .tp = 2}, policy);
  EXPECT_THAT(plan.owners, ElementsAre(0, 1, 2, 0, 1, 2, 0, 1));
  EXPECT_THAT(plan.tp_owners, ElementsAre(0, 0, 0, 1, 1, 1, 0, 0));
}

TEST(PlanTp, LimitsTheCellsOfAUnitAndNotItsRanks) {
  for (const int64_t limit : {1, 2}) {
    for (const OwnerStrategy strategy : {OwnerStrategy::lpt, OwnerStrategy::round_robin}) {
      const PlanPolicy policy{.strategy = strategy, .max_owners_per_group = limit};
      const OwnershipPlan plan =
          make_plan(gpt(6, 16, 4), {.shard = 3, .replicate = 2, .tp = 4}, policy);
      for (const Unit& unit : plan.units) EXPECT_LE(unit.segments.size(), limit) << unit.name;
    }
  }
  const OwnershipPlan plan =
      make_plan(gpt(6, 16, 4), {.shard = 6, .tp = 4}, {.max_owners_per_group = 1});
  EXPECT_EQ(largest(matrices_per_rank(plan)), 1);  // each unit on one cell, each matrix on a rank
}

TEST(PlanTp, KeepsAnOwnerLimitOnTheAdamwRouteToo) {
  std::mt19937_64 random(6);
  const PlanPolicy policy{.max_owners_per_group = 2};
  const OwnershipPlan plan =
      make_plan(random_list(random, 120, 4, true), {.shard = 10, .tp = 4}, policy);
  for (const Unit& unit : plan.units) EXPECT_LE(unit.segments.size(), 2u) << unit.name;
}

TEST(PlanTp, FindsOwnersWhereShardsFillTheMemory) {
  std::vector<Matrix> list;  // 20 + 4 bytes each; two on one cell hold 8 everywhere
  for (const char* name : {"a", "b", "c", "d"}) {
    list.push_back({.name = name, .rows = 2, .cols = 2, .state_bytes = 20, .shard_bytes = 4});
  }
  const OwnershipPlan plan = make_plan(list, {.shard = 2, .tp = 2}, {.memory_limit_bytes = 28});
  EXPECT_THAT(plan.state_bytes(), Each(28));
}

TEST(PlanTp, SaysWhatAMemoryLimitWouldHaveToBe) {
  const Matrix a{.name = "a", .rows = 2, .cols = 2, .state_bytes = 20, .shard_bytes = 4};
  EXPECT_THAT(([&] { make_plan({a}, {.shard = 2, .tp = 2}, {.memory_limit_bytes = 23}); }),
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("memory_limit_bytes is 23"), HasSubstr("largest matrix holds 24"),
                        HasSubstr("all together 28 on 4 ranks"), HasSubstr("at least 24"))));
}

TEST(PlanTp, NamesTheNegativeShard) {
  const Matrix a{.name = "a", .rows = 2, .cols = 2, .shard_bytes = -4};
  EXPECT_THAT([&] { make_plan({a}, {.shard = 2}, {}); },
              ThrowsMessage<ConfigError>(HasSubstr("'a' has shard_bytes = -4")));
}

TEST(PlanTp, TheDigestSeesTheAxisAndTheShards) {
  std::vector<Matrix> list = gpt(2, 8, 2);
  std::set<std::string> seen;
  for (const Mesh& mesh : {Mesh{.shard = 4}, Mesh{.shard = 4, .tp = 2}, Mesh{.shard = 2, .tp = 2},
                           Mesh{.replicate = 2, .tp = 2}, Mesh{.tp = 4}}) {
    seen.insert(make_plan(list, mesh, {}).digest.hex());
  }
  EXPECT_THAT(seen, SizeIs(5));
  const auto add = [&] { seen.insert(make_plan(list, {.shard = 4}, {}).digest.hex()); };
  list[3].shard_bytes += 1;
  add();
  list[3].shard_bytes = 0;
  add();
  std::swap(list[3].shard_bytes, list[3].state_bytes);
  add();
  EXPECT_THAT(seen, SizeIs(8));
}

}  // namespace
}  // namespace dmuon

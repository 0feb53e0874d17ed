#include "engine/assign.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <queue>
#include <random>
#include <set>

#include "engine/error.h"
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

// Sums of up to 1e5 doubles taken in two orders differ by less than this, relatively.
constexpr double kRounding = 1e-10;

AssignProblem problem(std::vector<double> costs, int64_t slots) {
  const size_t size = costs.size();
  std::vector<int32_t> units(size);
  std::iota(units.begin(), units.end(), 0);
  return {.costs = std::move(costs),
          .bytes = std::vector<int64_t>(size),
          .units = units,
          .layers = std::vector<int32_t>(size, -1),
          .slots = slots};
}

double makespan(const AssignProblem& p, const std::vector<int32_t>& owners) {
  return largest(sum_per_slot(p.costs, owners, p.slots));
}

double makespan(const AssignProblem& p) { return makespan(p, assign_lpt(p)); }

double best_makespan(const std::vector<double>& costs, int64_t slots) {
  std::vector<double> loads(slots);
  return best_makespan(costs, loads, 0);
}

std::vector<int32_t> counts(const std::vector<int32_t>& owners, int64_t slots) {
  std::vector<int32_t> count(slots);
  for (int32_t owner : owners) ++count[owner];
  return count;
}

bool idle_beside_two(const std::vector<int32_t>& owners, int64_t slots) {
  const std::vector<int32_t> count = counts(owners, slots);
  return *std::min_element(count.begin(), count.end()) == 0 && largest(count) >= 2;
}

std::vector<double> random_costs(std::mt19937_64& random, size_t size, int64_t largest_cost) {
  std::vector<double> costs(size);
  for (double& cost : costs) cost = static_cast<double>(random() % (largest_cost + 1));
  return costs;
}

std::map<int32_t, std::set<int32_t>> owners_per_unit(const AssignProblem& p,
                                                     const std::vector<int32_t>& owners) {
  std::map<int32_t, std::set<int32_t>> result;
  for (size_t i = 0; i < owners.size(); ++i) result[p.units[i]].insert(owners[i]);
  return result;
}

TEST(AssignLpt, GivesEachMatrixASlotOfItsOwnWhereThereAreEnough) {
  EXPECT_THAT(assign_lpt(problem({3, 9, 5}, 5)), ElementsAre(2, 0, 1));
}

TEST(AssignLpt, FindsWhatPlainLptMisses) {
  // LPT: 5+3, then 4+3, then 3 onto the 7: 10. Best: 5+4 and 3+3+3.
  EXPECT_EQ(lpt_makespan({5, 4, 3, 3, 3}, 2), 10);
  EXPECT_EQ(makespan(problem({5, 4, 3, 3, 3}, 2)), 9);
}

TEST(AssignLpt, BreaksTheWorstCaseOfPlainLpt) {
  // Graham's instance: LPT takes 4/3 - 1/(3m) of the optimum.
  EXPECT_EQ(lpt_makespan({7, 7, 6, 6, 5, 5, 4, 4, 4}, 4), 15);
  EXPECT_EQ(makespan(problem({7, 7, 6, 6, 5, 5, 4, 4, 4}, 4)), 12);
}

TEST(AssignLpt, IsOptimalOnSmallProblemsAndTheBoundHolds) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    const auto slots = static_cast<int64_t>(1 + random() % 4);
    const std::vector<double> costs = random_costs(random, 1 + random() % 8, i % 2 ? 9 : 1000);
    const double best = best_makespan(costs, slots);
    EXPECT_EQ(makespan(problem(costs, slots)), best);
    EXPECT_LE(makespan_bound(costs, slots), best);
  }
}

struct Size {
  size_t matrices;
  int64_t slots;
};

class AssignMany : public ::testing::TestWithParam<Size> {
 protected:
  void expect_good(const std::vector<double>& costs) {
    const AssignProblem p = problem(costs, GetParam().slots);
    const std::vector<int32_t> owners = assign_lpt(p);
    EXPECT_THAT(owners, SizeIs(costs.size()));
    EXPECT_THAT(owners, Each(AllOf(::testing::Ge(0), ::testing::Lt(p.slots))));
    EXPECT_LE(makespan(p, owners), lpt_makespan(costs, p.slots) * (1 + kRounding));
    EXPECT_GE(makespan(p, owners), makespan_bound(costs, p.slots) * (1 - kRounding));
    EXPECT_FALSE(idle_beside_two(owners, p.slots));
    EXPECT_EQ(owners, assign_lpt(p));
  }
};

TEST_P(AssignMany, IsNeverWorseThanLptWithFewCosts) {
  std::mt19937_64 random(2);
  std::vector<double> costs(GetParam().matrices);
  for (double& cost : costs) cost = std::vector<double>{36, 0.9375, 56}[random() % 3];
  expect_good(costs);
}

TEST_P(AssignMany, IsNeverWorseThanLptWithManyCosts) {
  std::mt19937_64 random(3);
  expect_good(random_costs(random, GetParam().matrices, 1'000'000'000));
}

TEST_P(AssignMany, IsNeverWorseThanLptWithEmptyMatrices) {
  std::mt19937_64 random(4);
  expect_good(random_costs(random, GetParam().matrices, 2));
  expect_good(std::vector<double>(GetParam().matrices));
}

TEST_P(AssignMany, IsNeverWorseThanLptWithOneGiant) {
  std::vector<double> costs(GetParam().matrices, 1);
  costs[GetParam().matrices / 2] = 1e6;
  expect_good(costs);
}

INSTANTIATE_TEST_SUITE_P(Sizes, AssignMany,
                         ::testing::Values(Size{1, 1}, Size{7, 3}, Size{48, 8}, Size{64, 10},
                                           Size{224, 64}, Size{560, 512}, Size{560, 7},
                                           Size{3'000, 1'000}, Size{9'000, 10'000},
                                           Size{30'000, 10'000}));

TEST(AssignLpt, LeavesTheGiantAlone) {
  std::vector<double> costs(100, 1);
  costs[42] = 1000;
  const std::vector<int32_t> owners = assign_lpt(problem(costs, 4));
  EXPECT_EQ(counts(owners, 4)[owners[42]], 1);
}

TEST(AssignLpt, SpreadsAUnitWhereLoadsAreEqual) {
  AssignProblem p = problem(std::vector<double>(12, 5), 4);
  for (int32_t i = 0; i < 12; ++i) p.units[i] = i % 3;  // units interleaved, four matrices each
  for (const auto& [unit, owners] : owners_per_unit(p, assign_lpt(p))) {
    EXPECT_THAT(owners, SizeIs(4)) << "unit " << unit;
  }
}

TEST(AssignLpt, SpreadsALayerOfSeveralUnits) {
  AssignProblem p = problem(std::vector<double>(12, 5), 4);
  for (int32_t i = 0; i < 12; ++i) p.layers[i] = i % 3;
  const std::vector<int32_t> owners = assign_lpt(p);
  std::map<int32_t, std::set<int32_t>> per_layer;
  for (int32_t i = 0; i < 12; ++i) per_layer[p.layers[i]].insert(owners[i]);
  for (const auto& [layer, of_layer] : per_layer) EXPECT_THAT(of_layer, SizeIs(4)) << layer;
}

TEST(AssignLpt, DoesNotPayForSpreadWithBalance) {
  // The only way to 10 and 10 puts both matrices of unit 0 on one slot.
  AssignProblem p = problem({6, 4, 7, 3}, 2);
  p.units = {0, 0, 1, 1};
  EXPECT_EQ(makespan(p), 10);
}

TEST(AssignLpt, KeepsTheMemoryLimit) {
  AssignProblem p = problem({8, 1, 1, 1, 1, 1}, 2);
  p.bytes = {10, 10, 10, 10, 10, 10};
  p.memory_limit = 30;  // by cost alone, one slot would hold five
  const std::vector<int32_t> owners = assign_lpt(p);
  EXPECT_THAT(counts(owners, 2), ElementsAre(3, 3));
}

TEST(AssignLpt, FindsOwnersWithinATightMemoryLimit) {
  AssignProblem p = problem({1, 1, 1, 1, 1}, 2);
  p.bytes = {6, 5, 4, 3, 2};
  p.memory_limit = 10;
  EXPECT_THAT(sum_per_slot(p.bytes, assign_lpt(p), 2), ElementsAre(10, 10));
}

TEST(AssignLpt, KeepsTheMemoryLimitInRandomProblems) {
  std::mt19937_64 random(6);
  for (int i = 0; i < 50; ++i) {
    AssignProblem p = problem(random_costs(random, 40, 100), 5);
    for (int64_t& bytes : p.bytes) bytes = static_cast<int64_t>(random() % 50);
    const int64_t total = std::accumulate(p.bytes.begin(), p.bytes.end(), int64_t{0});
    p.memory_limit = total / 5 + 25;
    const std::vector<int32_t> owners = assign_lpt(p);
    EXPECT_LE(largest(sum_per_slot(p.bytes, owners, 5)), p.memory_limit);
    EXPECT_FALSE(idle_beside_two(owners, 5));
  }
}

TEST(AssignLpt, SaysWhatAMemoryLimitWouldHaveToBe) {
  AssignProblem p = problem({1, 1, 1}, 2);
  p.bytes = {30, 20, 25};
  p.memory_limit = 29;
  EXPECT_THAT([&] { assign_lpt(p); },
              ThrowsMessage<ConfigError>(
                  AllOf(HasSubstr("memory_limit_bytes is 29"), HasSubstr("largest matrix holds 30"),
                        HasSubstr("all together 75 on 2 ranks"), HasSubstr("at least 38"))));
  EXPECT_THAT([&] { assign_round_robin(p); },
              ThrowsMessage<ConfigError>(HasSubstr("memory_limit_bytes is 29")));
}

TEST(AssignLpt, NamesTheOwnerLimitWhereItMakesMemoryScarce) {
  AssignProblem p = problem({1, 1}, 2);
  p.units = {0, 0};
  p.bytes = {20, 20};
  p.memory_limit = 30;
  p.max_owners = 1;
  EXPECT_THAT([&] { assign_lpt(p); },
              ThrowsMessage<ConfigError>(HasSubstr("max_owners_per_group = 1")));
}

TEST(AssignLpt, KeepsTheOwnerLimit) {
  std::mt19937_64 random(8);
  for (int64_t limit : {1, 2, 3}) {
    AssignProblem p = problem(random_costs(random, 120, 50), 16);
    for (size_t i = 0; i < p.units.size(); ++i) p.units[i] = static_cast<int32_t>(i / 8);
    p.max_owners = limit;
    const auto per_unit = owners_per_unit(p, assign_lpt(p));
    for (const auto& [unit, owners] : per_unit) EXPECT_LE(owners.size(), limit) << unit;
    for (const auto& [unit, owners] : owners_per_unit(p, assign_round_robin(p))) {
      EXPECT_LE(owners.size(), limit) << unit;
    }
  }
}

TEST(AssignRoundRobin, GoesByIndex) {
  EXPECT_THAT(assign_round_robin(problem({9, 1, 1, 1, 1}, 3)), ElementsAre(0, 1, 2, 0, 1));
}

TEST(AssignRoundRobin, PassesOverFullSlots) {
  AssignProblem p = problem({1, 1, 1, 1}, 2);
  p.bytes = {5, 1, 1, 1};
  p.memory_limit = 5;
  EXPECT_THAT(assign_round_robin(p), ElementsAre(0, 1, 1, 1));
}

TEST(MakespanBound, IsTheLargestCost) { EXPECT_EQ(makespan_bound({9, 1, 1}, 3), 9); }

TEST(MakespanBound, IsTheMean) { EXPECT_EQ(makespan_bound({1, 1, 1, 1, 1, 1}, 2), 3); }

TEST(MakespanBound, CountsTheSlotThatHoldsTwo) {
  EXPECT_EQ(makespan_bound({5, 5, 4, 1}, 2), 9);      // 5 + 4; the mean is 7.5
  EXPECT_EQ(makespan_bound({4, 4, 4, 4, 4}, 2), 12);  // three of five; the mean is 10
}

TEST(MakespanBound, OfNothingIsZero) {
  EXPECT_EQ(makespan_bound({}, 3), 0);
  EXPECT_EQ(makespan_bound({0, 0}, 1), 0);
}

}  // namespace
}  // namespace dmuon

#include "engine/agreement.h"

#include <gmock/gmock.h>

#include "engine/error.h"
#include "tests/support/sim_transport.h"

namespace dmuon {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::SimWorld;

// What each rank's agree() said; "" where it agreed.
std::vector<std::string> outcomes(const std::vector<Proposal>& proposals) {
  const int size = static_cast<int>(proposals.size());
  SimWorld world(size);
  std::vector<std::string> said(size);
  run_ranks(size, [&](int rank) {
    auto transport = world.transport(rank);
    try {
      agree(*transport, proposals[rank]);
    } catch (const ConfigError& error) {
      said[rank] = error.what();
    }
  });
  return said;
}

TEST(Agree, SaysNothingWhereAllProposeTheSame) {
  EXPECT_THAT(outcomes(std::vector<Proposal>(4, {{"a\t[2, 3]", "b\t[3]"}, ""})), Each(""));
}

TEST(Agree, NamesTheParametersThatDifferAndTheRanksOnEveryRank) {
  const Proposal both{{"a\t[2, 3]", "b\t[3, 3]"}, ""};
  const Proposal only_a{{"a\t[2, 3]"}, ""};
  const auto said = outcomes({both, both, only_a, both});
  EXPECT_THAT(said, Each(HasSubstr("'b': chosen on ranks 0, 1, 3, not on rank 2")));
  EXPECT_THAT(said, Each(::testing::Not(HasSubstr("'a'"))));
  EXPECT_THAT(said, Each(said[0]));
}

TEST(Agree, TellsWhichRankSeesWhichShape) {
  const auto said = outcomes({{{"a\t[2, 3]"}, ""}, {{"a\t[3, 2]"}, ""}});
  EXPECT_THAT(said, Each(HasSubstr("rank 0: [2, 3]; rank 1: [3, 2]")));
}

TEST(Agree, RaisesOneRanksErrorOnAll) {
  const Proposal fine{{"a\t[2, 3]"}, ""};
  const auto said = outcomes({fine, {{}, "KeyError: 'x'"}, fine});
  EXPECT_THAT(said, Each("on rank 1: KeyError: 'x'"));
}

TEST(Agree, RepeatsAnErrorOfAllRanksAsItIs) {
  EXPECT_THAT(outcomes(std::vector<Proposal>(3, {{}, "nothing chosen"})), Each("nothing chosen"));
}

TEST(Agree, ListsAtMostTenNames) {
  Proposal many;
  for (int i = 10; i < 30; ++i) many.lines.push_back("p" + std::to_string(i) + "\t[1]");
  const auto said = outcomes({many, {}});
  EXPECT_THAT(said[0], HasSubstr("'p19'"));
  EXPECT_THAT(said[0], ::testing::Not(HasSubstr("'p20'")));
  EXPECT_THAT(said[0], HasSubstr("and 10 more"));
}

std::vector<StepVerdict> verdicts(const std::vector<StepWord>& words) {
  const int size = static_cast<int>(words.size());
  SimWorld world(size);
  std::vector<StepVerdict> all(size);
  run_ranks(size, [&](int rank) {
    auto transport = world.transport(rank);
    all[rank] = agree_on_step(*transport, words[rank]);
  });
  return all;
}

TEST(AgreeOnStep, OneRanksWordReachesAll) {
  const auto all = verdicts({{}, {.any_gradient = true, .nonfinite = 7}, {.failed = true}});
  for (const auto& verdict : all) {
    EXPECT_TRUE(verdict.any_gradient);
    EXPECT_EQ(verdict.nonfinite, 7);
    EXPECT_TRUE(verdict.failed);
    EXPECT_FALSE(verdict.sequence_differs);
    EXPECT_FALSE(verdict.settings_differ);
  }
}

TEST(AgreeOnStep, FindsOneDifferingHashWhateverItsSign) {
  for (const int64_t other : {int64_t{4}, int64_t{6}, INT64_MIN, INT64_MAX, int64_t{-5}}) {
    const auto all = verdicts({{.sequence = 5}, {.sequence = other}, {.sequence = 5}});
    EXPECT_TRUE(all[0].sequence_differs && all[1].sequence_differs) << other;
    EXPECT_FALSE(all[0].settings_differ);
  }
  EXPECT_TRUE(verdicts({{.settings = -1}, {.settings = 0}})[1].settings_differ);
}

TEST(FromRank0, EveryRankGetsItsList) {
  SimWorld world(3);
  run_ranks(3, [&](int rank) {
    auto transport = world.transport(rank);
    const auto list = from_rank_0(
        *transport, rank == 0 ? std::vector<int32_t>{2, 0, 1} : std::vector<int32_t>{0, 1, 2});
    EXPECT_THAT(list, ElementsAre(2, 0, 1));
  });
}

}  // namespace
}  // namespace dmuon

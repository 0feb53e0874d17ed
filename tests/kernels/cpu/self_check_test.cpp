#include "kernels/cpu/self_check.h"

#include <gmock/gmock.h>

#include "tests/kernels/cpu/every_isa.h"
#include "tests/kernels/matrices.h"

namespace dmuon::cpu {
namespace {

class SelfCheck : public EveryIsa {};

TEST_P(SelfCheck, TrustsTheKernelsOfThisMachine) {
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    for (auto [rows, cols] : {std::pair{8, 30}, {30, 8}, {100, 400}}) {
      EXPECT_TRUE(trusted(recipe_for(rows, cols, with(algorithm)), rows, cols));
    }
  }
}

TEST_P(SelfCheck, SeesAKernelThatGetsOneTileWrong) {
  TileKernels broken = kernels();
  broken.multiply[0] = [](const Tile& tile) { *tile.out += 1; };
  const Recipe recipe = recipe_for(7, 23, {});
  EXPECT_LT(error_of(kernels(), recipe, 7, 23), kTolerance);
  EXPECT_FALSE(error_of(broken, recipe, 7, 23) < 0.1) << "NaN counts as wrong";
}

INSTANTIATE_TEST_SUITE_P(Levels, SelfCheck, ::testing::ValuesIn(available_isas()), name_of);

}  // namespace
}  // namespace dmuon::cpu

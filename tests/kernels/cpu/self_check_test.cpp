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

TEST_P(SelfCheck, WhereItFailsTorchsProductsRunAndTheNameSaysSo) {
  const at::Tensor x = float32(random_matrix({20, 160}));
  const Recipe recipe = recipe_for(20, 160, {});
  set_verdict(recipe, 20, 160, false);
  EXPECT_EQ(newton_schulz_kernel(1, 20, 160, {}), "gram/mm/float32");
  EXPECT_LT(distance(newton_schulz(x, {}), exact(x)), kTolerance);
  const NewtonSchulz direct = with(NsAlgorithm::direct);
  EXPECT_EQ(newton_schulz_kernel(1, 20, 160, direct), recipe_name(recipe_for(20, 160, direct)))
      << "another class is not touched";
  set_verdict(recipe, 20, 160, true);
}

INSTANTIATE_TEST_SUITE_P(Levels, SelfCheck, ::testing::ValuesIn(available_isas()), name_of);

}  // namespace
}  // namespace dmuon::cpu

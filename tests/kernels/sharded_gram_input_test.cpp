#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "kernels/error.h"
#include "kernels/sharded_gram.h"
#include "tests/kernels/matrices.h"
#include "tests/kernels/shards.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ShardedGramInput, IsBitwiseTheSameForAnyPowerOfTwo) {
  const at::Tensor x = float32(random_matrix({16, 48})), want = sharded(x, CutDim::cols, {30, 18});
  for (int exponent : {-100, -90, -20, 7, 100, 127}) {
    const at::Tensor scaled = x * std::ldexp(1.0, exponent);
    EXPECT_TRUE(at::equal(sharded(scaled, CutDim::cols, {30, 18}), want)) << exponent;
  }
}

TEST(ShardedGramInput, KnowsNoScale) {
  for (CutDim cut : {CutDim::rows, CutDim::cols}) {
    const at::Tensor x = float32(random_matrix({16, 48}));
    for (double scale : {1e-30, 1e-18, 1e-7, 1e18, 1e30, 3e38}) {
      EXPECT_LT(distance(sharded(x * scale, cut, uneven(x, cut, 3)), exact(x)), kTolerance)
          << scale;
    }
  }
}

// A piece 10^6 times smaller is part of the Gram matrix, one 10^30 times smaller is not and must
// disturb nothing.
TEST(ShardedGramInput, CombinesShardsOfVeryDifferentMagnitude) {
  for (double ratio : {1e-3, 1e-6, 1e-18, 1e-30}) {
    for (double scale : {1e-8, 1.0, 1e30}) {
      at::Tensor x = float32(random_matrix({60, 16})) * scale;
      x.slice(0, 0, 25).mul_(ratio);
      const at::Tensor want = exact(x), got = sharded(x, CutDim::rows, {25, 10, 25});
      EXPECT_LT(distance(got, want), kTolerance) << ratio << " of " << scale;
      EXPECT_LT(distance(got.slice(0, 0, 25), want.slice(0, 0, 25)), kTolerance)
          << ratio << " of " << scale;
    }
  }
}

TEST(ShardedGramInput, OfZeroIsZero) {
  at::Tensor batch = float32(random_matrix({3, 32, 8}));
  batch[1].zero_();
  for (const Lengths& lengths : {Lengths{32}, {20, 0, 12}}) {
    const at::Tensor result = sharded(batch, CutDim::rows, lengths);
    EXPECT_TRUE(at::equal(result[1], at::zeros({32, 8}, at::kFloat)));
    EXPECT_LT(distance(result[2], exact(batch[2])), kTolerance);
  }
}

TEST(ShardedGramInput, TakesAShardOfZerosBesideTinyOnes) {
  at::Tensor x = float32(random_matrix({8, 40})) * 1e-35;
  x.slice(1, 0, 10).zero_();
  const at::Tensor result = sharded(x, CutDim::cols, {10, 30});
  EXPECT_TRUE(at::equal(result.slice(1, 0, 10), at::zeros({8, 10}, at::kFloat)));
  EXPECT_LT(distance(result, exact(x)), kTolerance);
}

TEST(ShardedGramInput, SpreadsNonFiniteInputOverItsOwnMatrixOnAllRanks) {
  for (double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity()}) {
    for (int steps : {1, 2, 5}) {
      const NewtonSchulz options{.steps = steps, .restarts = std::vector<int>{}};
      at::Tensor batch = float32(random_matrix({3, 8, 32}));
      batch[1].slice(1, 20).zero_();
      batch[1][2][3] = bad;
      const at::Tensor result = sharded(batch, CutDim::cols, {20, 0, 12}, options);
      EXPECT_TRUE(at::isnan(result[1]).all().item<bool>()) << bad << ", " << steps << " steps";
      EXPECT_LT(distance(result[0], exact(batch[0], options)), kTolerance);
      EXPECT_LT(distance(result[2], exact(batch[2], options)), kTolerance);
    }
  }
}

TEST(ShardedGramInput, SeesTheSmallestFloatThereIs) {
  at::Tensor x = at::zeros({4, 6}, at::kFloat);
  x[1][2] = std::numeric_limits<float>::denorm_min();
  const at::Tensor result = sharded(x, CutDim::cols, {2, 4});
  EXPECT_NEAR(result[1][2].item<double>(), mapped(1, polar_express_coefficients(), 5), 1e-5);
}

TEST(ShardedGramInput, TakesFloat64BeyondTheRangeOfFloat32) {
  const at::Tensor x = random_matrix({2, 16, 48});
  for (double scale : {1e-300, 1e-200, 1.0, 1e200, 1e300}) {
    EXPECT_LT(distance(sharded(x * scale, CutDim::cols, {40, 8})[1], exact(x[1])), kTolerance)
        << scale;
  }
}

TEST(ShardedGramInput, ReadsAnyStridesAndDtypesAndLeavesItsInputAlone) {
  const at::Tensor base = float32(random_matrix({2, 64, 40}));
  for (const at::Tensor& x : {base.slice(2, 0, 40, 2), base.mT(), base[0].t(),
                              base.to(at::kBFloat16), base[1].to(at::kHalf)}) {
    const at::Tensor before = x.clone();
    const std::vector<at::Tensor> got = orthogonalised({x}, longer(x), {});
    EXPECT_TRUE(at::equal(x, before));
    EXPECT_TRUE(got[0].is_contiguous());
    EXPECT_EQ(got[0].scalar_type(), at::kFloat);
    EXPECT_LT(distance(got[0], newton_schulz(x, {})), kTolerance) << x.sizes();
  }
}

TEST(ShardedGramInput, ReturnsEmptyForEmpty) {
  for (std::vector<int64_t> sizes :
       {std::vector<int64_t>{0, 5}, {5, 0}, {0, 0}, {0, 4, 8}, {3, 0, 8}, {3, 8, 0}}) {
    const at::Tensor x = at::zeros(sizes, at::kFloat);
    EXPECT_EQ(orthogonalised({x, x}, CutDim::rows, {})[1].sizes(), at::IntArrayRef(sizes));
    EXPECT_EQ(orthogonalised({x, x}, CutDim::cols, {})[0].sizes(), at::IntArrayRef(sizes));
  }
}

TEST(ShardedGramInput, IsNotRecordedByAutograd) {
  const at::Tensor x = float32(random_matrix({8, 32})).requires_grad_();
  EXPECT_FALSE(orthogonalised({x}, CutDim::cols, {})[0].requires_grad());
}

TEST(ShardedGramInput, NamesWhatIsWrong) {
  GramShard shard(float32(random_matrix({2, 6, 9})), CutDim::cols, {});
  GramOwner owner(2, 6, {});
  const at::Tensor good = at::zeros({sharded_gram_elements(2, 6)}, at::kFloat);
  const at::Tensor wide = good.to(at::kDouble), small = good.slice(0, 1);
  EXPECT_THAT([&] { shard.gram(small); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("[43]"), HasSubstr("takes 44"))));
  EXPECT_THAT([&] { shard.apply(wide); }, ThrowsMessage<ConfigError>(HasSubstr("dtype Double")));
  EXPECT_THAT(
      [&] {
        owner.round({good, small}, good);
      },
      ThrowsMessage<ConfigError>(HasSubstr("payloads[1]")));
  EXPECT_THAT([&] { owner.round({good}, small); },
              ThrowsMessage<ConfigError>(HasSubstr("factor of sizes [43]")));
  EXPECT_THAT([&] { owner.round({}, good); }, ThrowsMessage<ConfigError>(HasSubstr("no payloads")));
}

TEST(ShardedGramInput, RefusesARoundTooMany) {
  GramOwner owner(1, 3, {});
  const at::Tensor zero = at::zeros({sharded_gram_elements(1, 3)}, at::kFloat);
  owner.round({zero}, zero.clone());
  owner.round({zero}, zero.clone());
  EXPECT_THAT([&] { owner.round({zero}, zero.clone()); },
              ThrowsMessage<ConfigError>(HasSubstr("round 3 of 2")));
}

TEST(ShardedGramInput, RefusesWhatIsNoMatrixAndBadOptions) {
  const NewtonSchulz none{.steps = 0};
  EXPECT_THAT([] { GramShard(at::zeros({4}), CutDim::rows, {}); },
              ThrowsMessage<ConfigError>(HasSubstr("1 dims")));
  EXPECT_THAT(
      [&] {
        GramShard(at::zeros({4, 4}), CutDim::rows, none);
      },
      ThrowsMessage<ConfigError>(HasSubstr("steps = 0")));
  EXPECT_THAT([&] { GramOwner(1, 4, none); }, ThrowsMessage<ConfigError>(HasSubstr("steps = 0")));
}

}  // namespace
}  // namespace dmuon

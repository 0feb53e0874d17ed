#include "kernels/sharded_gram.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include <algorithm>

#include "kernels/normalise.h"
#include "tests/kernels/matrices.h"
#include "tests/kernels/shards.h"

namespace dmuon {
namespace {

// The undistributed Gram kernel over the same dim, also where newton_schulz would choose another.
at::Tensor whole(const at::Tensor& x, CutDim cut, const NewtonSchulz& options) {
  Iterate iterate(normalised(x), cut == CutDim::rows ? GramSide::cols : GramSide::rows);
  Chain chain(iterate.square(at::kFloat));
  const std::vector<int> bounds = chain_bounds(options, {2});
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    iterate.gram(chain.gram());
    chain.run(options.coefficients, bounds[i], bounds[i + 1]);
    iterate.apply(chain.product());
  }
  return iterate.x();
}

// The largest error that `whole` makes in several orders of its sums. One order is not enough:
// where the smallest singular value decides, its error is one draw, which may be close to zero.
double error_of_the_whole(const at::Tensor& x, CutDim cut, const at::Tensor& want,
                          const NewtonSchulz& options) {
  const int64_t dim = cut_dim(cut);
  double worst = 0;
  for (int64_t shift : {0, 1, 3, 7, 11, 17}) {
    const at::Tensor got = whole(x.roll(shift, dim), cut, options);
    worst = std::max(worst, distance(got, want.roll(shift, dim)));
  }
  return worst;
}

// A norm in float32 rounds once more than that of the whole, which is a float64: it shows after one
// step, when all else is exact to as much.
void expect_as_exact_as_the_whole(const std::string& name, const at::Tensor& x, CutDim cut,
                                  int64_t ranks, const NewtonSchulz& options) {
  const at::Tensor want = exact(x, options);
  const double error = distance(sharded(x, cut, uneven(x, cut, ranks), options), want);
  EXPECT_LT(error, 2 * error_of_the_whole(x, cut, want, options) + kEpsilon)
      << name << " " << x.sizes() << ", " << options.coefficients.name << ", " << options.steps
      << " steps, " << options.restarts->size() << " restarts, " << ranks << " ranks";
}

std::vector<NewtonSchulz> every_option() {
  std::vector<NewtonSchulz> all;
  for (const CoefficientSet* set :
       {&polar_express_coefficients(), &you_coefficients(), &jordan_coefficients()}) {
    for (int steps = 1; steps <= 10; ++steps) {
      for (const std::vector<int>& restarts : {std::vector<int>{}, {2}, {2, 4}}) {
        if (!restarts.empty() && restarts.back() >= steps) continue;
        all.push_back({.coefficients = *set, .steps = steps, .restarts = restarts});
      }
    }
  }
  return all;
}

TEST(ShardedGram, ErrsAtMostTwiceAsMuchAsTheWholeOnEverySpectrum) {
  for (std::vector<int64_t> sizes : {std::vector<int64_t>{24, 100}, {100, 24}, {40, 44}}) {
    for (const auto& [name, x] : matrix_zoo(sizes[0], sizes[1])) {
      const at::Tensor x32 = float32(x);
      for (int64_t ranks : {1, 3, 8}) {
        expect_as_exact_as_the_whole(name, x32, longer(x32), ranks, {});
      }
    }
  }
}

TEST(ShardedGram, ErrsAtMostTwiceAsMuchAsTheWholeForEveryOption) {
  for (const NewtonSchulz& options : every_option()) {
    for (const auto& [name, x] : matrix_zoo(16, 56)) {
      expect_as_exact_as_the_whole(name, float32(x), CutDim::cols, 4, options);
    }
  }
}

TEST(ShardedGram, ErrsAtMostTwiceAsMuchAsTheWholeWhereTheShortDimIsCut) {
  for (std::vector<int64_t> sizes : {std::vector<int64_t>{24, 100}, {100, 24}, {40, 44}}) {
    for (const auto& [name, x] : matrix_zoo(sizes[0], sizes[1])) {
      const at::Tensor x32 = float32(x);
      expect_as_exact_as_the_whole(name, x32, shorter(x32), 4, {});
    }
  }
}

TEST(ShardedGram, AgreesWithNewtonSchulzForAnyNumberOfRanks) {
  for (CutDim cut : {CutDim::rows, CutDim::cols}) {
    for (std::vector<int64_t> sizes : {std::vector<int64_t>{24, 80}, {80, 24}, {32, 32}}) {
      const at::Tensor x = float32(with_spectrum(falling(24, 2), sizes[0], sizes[1]));
      for (int64_t ranks = 1; ranks <= 8; ++ranks) {
        EXPECT_LT(distance(sharded(x, cut, uneven(x, cut, ranks)), newton_schulz(x, {})),
                  kTolerance)
            << x.sizes() << ", " << ranks << " ranks";
      }
    }
  }
}

TEST(ShardedGram, TakesShardsInAnyOrder) {
  const at::Tensor x = float32(random_matrix({60, 16})), want = exact(x);
  const std::vector<at::Tensor> pieces = {x.slice(0, 40, 60), x.slice(0, 0, 10),
                                          x.slice(0, 10, 40)};
  const std::vector<at::Tensor> got = orthogonalised(pieces, CutDim::rows, {});
  EXPECT_LT(distance(got[0], want.slice(0, 40, 60)), kTolerance);
  EXPECT_LT(distance(got[1], want.slice(0, 0, 10)), kTolerance);
  EXPECT_LT(distance(got[2], want.slice(0, 10, 40)), kTolerance);
}

TEST(ShardedGram, TakesOneRankThatHoldsEverythingAmongEmptyOnes) {
  const at::Tensor x = float32(random_matrix({16, 40}));
  EXPECT_TRUE(at::equal(sharded(x, CutDim::cols, {0, 40, 0}), sharded(x, CutDim::cols, {40})));
}

TEST(ShardedGram, TreatsEachMatrixOfABatchAsIfItWereAlone) {
  for (CutDim cut : {CutDim::rows, CutDim::cols}) {
    const at::Tensor batch = float32(random_matrix({4, 48, 30}));
    batch[1].mul_(1e-12);
    const Lengths lengths = uneven(batch, cut, 3);
    const at::Tensor result = sharded(batch, cut, lengths);
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_LT(distance(result[i], sharded(batch[i], cut, lengths)), kTolerance) << i;
    }
  }
}

TEST(ShardedGram, OfABatchOfOneIsBitwiseThatOfTheMatrix) {
  const at::Tensor x = float32(random_matrix({1, 40, 16}));
  EXPECT_TRUE(
      at::equal(sharded(x, CutDim::rows, {30, 10})[0], sharded(x[0], CutDim::rows, {30, 10})));
}

TEST(ShardedGram, GivesTheSameBitsAgain) {
  const at::Tensor x = float32(random_matrix({2, 24, 80}));
  const at::Tensor once = sharded(x, CutDim::cols, {50, 20, 10});
  EXPECT_TRUE(at::equal(once, sharded(x, CutDim::cols, {50, 20, 10})));
}

TEST(ShardedGram, InBfloat16ErrsAtMostTwiceAsMuchAsThePlainIteration) {
  const NewtonSchulz options{.dtype = NsDtype::bfloat16};
  for (const auto& [name, x] : matrix_zoo(32, 256)) {
    const at::Tensor x32 = float32(x), want = exact(x32);
    const double plain = distance(newton_schulz_reference(x32.to(at::kBFloat16), {}), want);
    EXPECT_LT(distance(sharded(x32, CutDim::cols, {100, 0, 156}, options), want), 2 * plain)
        << name;
  }
}

TEST(ShardedGramRounds, AreOneMoreThanTheRestartsAndBreakLongChains) {
  EXPECT_EQ(sharded_gram_rounds({}), 2);
  EXPECT_EQ(sharded_gram_rounds({.restarts = std::vector<int>{}}), 1);
  EXPECT_EQ(sharded_gram_rounds({.restarts = std::vector{4, 2, 2}}), 3);
  EXPECT_EQ(sharded_gram_rounds({.steps = 1, .restarts = std::vector<int>{}}), 1);
  EXPECT_EQ(sharded_gram_rounds({.steps = 6, .restarts = std::vector<int>{}}), 2);
  EXPECT_EQ(sharded_gram_rounds({.steps = 11, .restarts = std::vector{2}}), 3);
  EXPECT_EQ(sharded_gram_rounds({.algorithm = NsAlgorithm::direct, .steps = 1}), 1);
}

TEST(ShardedGramBytes, CountATriangleAndAnExponentPerMatrix) {
  EXPECT_EQ(sharded_gram_elements(1, 4), 11);
  EXPECT_EQ(sharded_gram_elements(3, 4), 33);
  EXPECT_EQ(sharded_gram_elements(2, 0), 2);
}

// Order 1000, two ranks, two rounds: a triangle has 500501 elements, a shard of 1001 rows 1001000.
TEST(ShardedGramBytes, AreSavedWhereAShardIsLongerThanTheOrder) {
  EXPECT_FALSE(sharded_gram_saves_bytes(1000, 2002, 2, 2));
  EXPECT_TRUE(sharded_gram_saves_bytes(1000, 2003, 2, 2));
  EXPECT_FALSE(sharded_gram_saves_bytes(1000, 1001, 2, 1));
  EXPECT_TRUE(sharded_gram_saves_bytes(1000, 1002, 2, 1));
  EXPECT_FALSE(sharded_gram_saves_bytes(4096, 1024, 2, 1));
}

}  // namespace
}  // namespace dmuon

#include "kernels/sum_pieces.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "engine/error.h"
#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor flat(int64_t n, uint64_t seed, at::ScalarType dtype = at::kFloat) {
  return random_matrix({n}, seed).to(dtype);
}

// Of magnitudes so different that another order would give other bits.
std::vector<at::Tensor> uneven_pieces(int64_t n) {
  return {flat(n, 1) * 1e6, flat(n, 2, at::kBFloat16), flat(n, 3) * 1e-3, flat(n, 4, at::kHalf),
          flat(n, 5) * -1e6};
}

at::Tensor one_after_the_other(const std::vector<at::Tensor>& pieces) {
  at::Tensor sum = pieces[0].to(at::kFloat);
  for (size_t i = 1; i < pieces.size(); ++i) sum = at::add(sum, pieces[i].to(at::kFloat));
  return sum;
}

TEST(SumPieces, AddsFromLeftToRightBitForBit) {
  for (int64_t n : {1, 7, 1024, 5003}) {
    const std::vector<at::Tensor> pieces = uneven_pieces(n);
    at::Tensor out = at::empty({n}, at::kFloat);
    sum_pieces(out, pieces, 0.3, false);
    EXPECT_TRUE(at::equal(out, one_after_the_other(pieces) * 0.3)) << n;
    sum_pieces(out, {pieces.rbegin(), pieces.rend()}, 0.3, false);
    EXPECT_TRUE(at::equal(out, one_after_the_other({pieces.rbegin(), pieces.rend()}) * 0.3)) << n;
  }
}

TEST(SumPieces, AccumulatesOntoItsOutput) {
  const std::vector<at::Tensor> pieces = uneven_pieces(2000);
  at::Tensor out = flat(2000, 9);
  const at::Tensor want = out + one_after_the_other(pieces) * 0.25;
  sum_pieces(out, pieces, 0.25, true);
  EXPECT_TRUE(at::equal(out, want));
}

TEST(SumPieces, GivesTheSameBitsInAnyCutAndAtAnyOffset) {
  const std::vector<at::Tensor> pieces = uneven_pieces(3001);
  at::Tensor whole = at::empty({3001}, at::kFloat), cut = at::empty({3001}, at::kFloat);
  sum_pieces(whole, pieces, 0.7, false);
  for (int64_t begin = 0; begin < 3001; begin += 13) {
    const int64_t end = std::min<int64_t>(begin + 13, 3001);
    std::vector<at::Tensor> parts;
    for (const at::Tensor& piece : pieces) parts.push_back(piece.slice(0, begin, end));
    sum_pieces(cut.slice(0, begin, end), parts, 0.7, false);
  }
  EXPECT_TRUE(at::equal(whole, cut));
}

TEST(SumPieces, ReadsAPieceThatIsItsOutput) {
  at::Tensor out = flat(1500, 1);
  const at::Tensor other = flat(1500, 2), want = other + out;
  sum_pieces(out, {other, out}, 1, false);
  EXPECT_TRUE(at::equal(out, want));
}

TEST(SumPieces, SkipsUndefinedPieces) {
  const at::Tensor one = flat(10, 1);
  at::Tensor out = flat(10, 2);
  sum_pieces(out, {at::Tensor(), one, at::Tensor()}, 1, false);
  EXPECT_TRUE(at::equal(out, one));
  sum_pieces(out, {at::Tensor()}, 1, true);
  EXPECT_TRUE(at::equal(out, one)) << "nothing was added";
  sum_pieces(out, {}, 1, false);
  EXPECT_TRUE(at::equal(out, at::zeros({10}, at::kFloat)));
}

TEST(SumPieces, TakesStridedPiecesToo) {
  const at::Tensor strided = flat(40, 1).slice(0, 0, 40, 2), plain = flat(20, 2);
  at::Tensor out = at::empty({20}, at::kFloat);
  sum_pieces(out, {strided, plain}, 0.5, false);
  EXPECT_TRUE(at::equal(out, (strided + plain) * 0.5));
  sum_pieces(out, {strided, plain}, 1, true);
  EXPECT_TRUE(at::equal(out, (strided + plain) * 0.5 + (strided + plain)));
}

TEST(SumPieces, NamesThePieceOfTheWrongLength) {
  EXPECT_THAT(
      [] {
        sum_pieces(at::zeros({4}), {at::ones({4}), at::ones({5})}, 1, false);
      },
      ThrowsMessage<ConfigError>(HasSubstr("pieces[1] has sizes [5]; out has [4]")));
}

TEST(AllFinite, FindsOneBadElementAnywhere) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (double bad : {kNan, kInfinity, -kInfinity}) {
      for (int64_t place : {0, 4095, 4096, 5000}) {
        at::Tensor x = flat(5001, 1, dtype);
        EXPECT_TRUE(all_finite(x));
        x[place] = bad;
        EXPECT_FALSE(all_finite(x)) << dtype << " " << bad << " at " << place;
      }
    }
  }
}

TEST(AllFinite, HoldsForTheLargestFloatZeroAndNothing) {
  const at::Tensor x = at::zeros({3}, at::kFloat);
  x[1] = std::numeric_limits<float>::max();
  x[2] = -std::numeric_limits<float>::denorm_min();
  EXPECT_TRUE(all_finite(x));
  EXPECT_TRUE(all_finite(at::empty({0}, at::kFloat)));
}

TEST(AllFinite, LooksOnlyAtTheElementsOfAView) {
  at::Tensor x = flat(20, 1);
  x[1] = kNan;
  EXPECT_TRUE(all_finite(x.slice(0, 0, 20, 2)));
  EXPECT_FALSE(all_finite(x.slice(0, 1, 20, 2)));
}

// 3,001 terms in float64, each rounded a few times.
TEST(SumOfPowers, IsTheFloat64SumForEveryOrder) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::Tensor x = flat(3001, 1, dtype), wide = x.to(at::kDouble).abs();
    for (double p : {0.5, 1.0, 2.0, 3.0}) {
      const double want = wide.pow(p).sum().item<double>();
      EXPECT_NEAR(sum_of_powers(x, p), want, 3001 * 0x1p-52 * want) << dtype << ", p = " << p;
    }
    EXPECT_EQ(sum_of_powers(x, kInfinity), wide.max().item<double>());
  }
}

TEST(SumOfPowers, OfOrderZeroCountsWhatIsNotZero) {
  at::Tensor x = flat(100, 1);
  x.slice(0, 10, 30).zero_();
  EXPECT_EQ(sum_of_powers(x, 0), 80);
  EXPECT_EQ(sum_of_powers(x.slice(0, 0, 100, 2), 0), 40);
}

TEST(SumOfPowers, NeitherOverflowsNorLosesASmallTerm) {
  at::Tensor x = at::ones({1 << 20}, at::kFloat);
  x[0] = 3e38f;
  EXPECT_GT(sum_of_powers(x, 2), 8.9e76);
  x[0] = 1e4f;
  EXPECT_EQ(sum_of_powers(x, 2), 1e8 + (1 << 20) - 1);
}

TEST(SumOfPowers, CarriesNanAndInfinityOn) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    at::Tensor x = flat(100, 1, dtype);
    x[50] = -kInfinity;
    EXPECT_EQ(sum_of_powers(x, 2), kInfinity);
    EXPECT_EQ(sum_of_powers(x, kInfinity), kInfinity);
    x[60] = kNan;
    EXPECT_TRUE(std::isnan(sum_of_powers(x, 2)));
    EXPECT_TRUE(std::isnan(sum_of_powers(x, kInfinity)));
  }
}

TEST(SumOfPowers, IsZeroForNothingAndRefusesNegativeOrders) {
  EXPECT_EQ(sum_of_powers(at::empty({0}, at::kFloat), kInfinity), 0);
  EXPECT_EQ(sum_of_powers(at::empty({0}, at::kDouble), kInfinity), 0);
  EXPECT_THAT([] { sum_of_powers(at::ones({2}), -1); },
              ThrowsMessage<ConfigError>(HasSubstr("p is -1")));
}

}  // namespace
}  // namespace dmuon

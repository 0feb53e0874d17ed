#include <ATen/TensorOperators.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <limits>

#include "engine/error.h"
#include "kernels/cpu/workspace.h"
#include "kernels/newton_schulz.h"
#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(NewtonSchulzInput, ReturnsEmptyForEmpty) {
  for (std::vector<int64_t> sizes :
       {std::vector<int64_t>{0, 5}, {5, 0}, {0, 0}, {0, 4, 8}, {3, 0, 8}}) {
    const at::Tensor x = at::zeros(sizes, at::kBFloat16);
    EXPECT_EQ(newton_schulz(x, {}).sizes(), at::IntArrayRef(sizes));
    EXPECT_EQ(newton_schulz(x, {}).scalar_type(), at::kFloat);
    EXPECT_EQ(newton_schulz_reference(x, {}).sizes(), at::IntArrayRef(sizes));
  }
}

TEST(NewtonSchulzInput, OfZeroIsZero) {
  at::Tensor batch = float32(random_matrix({3, 8, 32}));
  batch[1].zero_();
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    const at::Tensor result = newton_schulz(batch, with(algorithm));
    EXPECT_TRUE(at::equal(result[1], at::zeros({8, 32}, at::kFloat)));
    EXPECT_LT(distance(result[2], exact(batch[2])), kTolerance);
    EXPECT_TRUE(at::equal(newton_schulz(batch[1], with(algorithm)), result[1]));
  }
}

TEST(NewtonSchulzInput, OfAVectorIsItsDirectionTimesTheImageOfOne) {
  for (std::vector<int64_t> sizes : {std::vector<int64_t>{1, 50}, {50, 1}, {1, 1}, {2, 1, 7}}) {
    const at::Tensor x = float32(random_matrix(sizes));
    const at::Tensor norm = x.norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true);
    const at::Tensor want = x / norm * mapped(1, polar_express_coefficients(), 5);
    EXPECT_LT(distance(newton_schulz(x, {}), want), 100 * kEpsilon) << x.sizes();
  }
}

TEST(NewtonSchulzInput, SpreadsNonFiniteInputOverItsOwnMatrixOnly) {
  for (double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    for (at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      at::Tensor batch = random_matrix({3, 8, 32}).to(dtype);
      batch[1][2][3] = bad;
      const at::Tensor result = newton_schulz(batch, {});
      EXPECT_TRUE(at::isnan(result[1]).all().item<bool>());
      EXPECT_LT(distance(result[0], exact(batch[0])), kTolerance);
      EXPECT_LT(distance(result[2], exact(batch[2])), kTolerance);
    }
  }
}

TEST(NewtonSchulzInput, ReadsAnyStridesAndLeavesItsInputAlone) {
  const at::Tensor base = float32(random_matrix({2, 64, 40}));
  for (const at::Tensor& x : {base.slice(2, 0, 40, 2), base.mT(), base[0].t(), base[1].slice(0, 3),
                              base[0][0].expand({8, 40})}) {
    const at::Tensor before = x.clone();
    const at::Tensor result = newton_schulz(x, {});
    EXPECT_TRUE(at::equal(result, newton_schulz(x.contiguous(), {})));
    EXPECT_TRUE(at::equal(x, before));
    EXPECT_TRUE(result.is_contiguous());
  }
}

TEST(NewtonSchulzInput, ReturnsFloat32ForEveryInputDtype) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = random_matrix({16, 64}).to(dtype);
    const at::Tensor result = newton_schulz(x, {});
    EXPECT_EQ(result.scalar_type(), at::kFloat);
    EXPECT_LT(distance(result, exact(x)), kTolerance) << dtype;
  }
}

TEST(NewtonSchulzInput, IsNotRecordedByAutograd) {
  const at::Tensor x = float32(random_matrix({8, 32})).requires_grad_();
  EXPECT_FALSE(newton_schulz(x, {}).requires_grad());
  EXPECT_FALSE(newton_schulz_reference(x, {}).requires_grad());
}

TEST(NewtonSchulzOptions, NameWhatIsWrong) {
  NewtonSchulz none, empty, late, early, direct;
  none.steps = 0;
  empty.coefficients = {"mine", {}, PastEnd::cycle};
  late.restarts = std::vector{2, 5};
  early.restarts = std::vector{0};
  direct = with(NsAlgorithm::direct);
  direct.steps = 1;
  EXPECT_THAT([&] { none.validate(); }, ThrowsMessage<ConfigError>(HasSubstr("steps = 0")));
  EXPECT_THAT([&] { empty.validate(); },
              ThrowsMessage<ConfigError>(HasSubstr("'mine' has 0 rows")));
  EXPECT_THAT([&] { late.validate(); },
              ThrowsMessage<ConfigError>(HasSubstr("restart before step 5 of 5")));
  EXPECT_THAT([&] { early.validate(); },
              ThrowsMessage<ConfigError>(HasSubstr("restart before step 0 of 5")));
  EXPECT_NO_THROW(direct.validate()) << "direct has no restarts to misplace";
}

TEST(NewtonSchulzInput, RefusesWhatIsNoMatrixAndBadOptions) {
  NewtonSchulz none;
  none.steps = 0;
  EXPECT_THAT([] { newton_schulz(at::ones({4}), {}); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("1 dims"), HasSubstr("[m, n]"))));
  EXPECT_THAT(
      [] {
        newton_schulz(at::ones({2, 2, 2, 2}), {});
      },
      ThrowsMessage<ConfigError>(HasSubstr("4 dims")));
  EXPECT_THAT(
      [] {
        newton_schulz(at::ones({2, 2}, at::kInt), {});
      },
      ThrowsMessage<ConfigError>(HasSubstr("dtype Int")));
  EXPECT_THAT(
      [&] {
        newton_schulz(at::ones({2, 2}), none);
      },
      ThrowsMessage<ConfigError>(HasSubstr("steps = 0")));
}

TEST(NewtonSchulzInput, TakesNoFloatOfEightBits) {
  const at::Tensor x = at::zeros({4, 8}, at::kFloat8_e4m3fn);
  EXPECT_THAT([&] { newton_schulz(x, {}); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("Float8_e4m3fn"), HasSubstr("bfloat16"))));
}

TEST(NewtonSchulzInput, RefusesATensorWhoseMemoryIsGone) {
  const at::Tensor x = float32(random_matrix({64, 128}));
  x.storage().unsafeGetStorageImpl()->set_nbytes(64);
  EXPECT_THAT([&] { newton_schulz(x, {}); }, ThrowsMessage<ConfigError>(HasSubstr("freed")));
  NsWorkspace workspace;
  const at::Tensor in = float32(random_matrix({64, 128}));
  EXPECT_THAT(
      [&] {
        newton_schulz({{in, x}}, {}, workspace);
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("an out"), HasSubstr("freed"))));
}

TEST(NewtonSchulzInput, RefusesWhatHasNoStridedMemory) {
  const at::Tensor x = float32(random_matrix({4, 8}));
  for (const at::Tensor& other : {x.to_sparse(), at::_efficientzerotensor({4, 8}), at::Tensor()}) {
    EXPECT_THROW(newton_schulz(other, {}), ConfigError);
    EXPECT_THROW(newton_schulz_reference(other, {}), ConfigError);
  }
}

TEST(NewtonSchulzInput, SeesTheSignOfALazilyNegatedTensor) {
  const at::Tensor x = float32(random_matrix({8, 24}));
  const at::Tensor lazy = at::_neg_view(x);
  ASSERT_TRUE(lazy.is_neg());
  EXPECT_TRUE(at::equal(newton_schulz(lazy, {}), newton_schulz(x.neg(), {})));
}

TEST(NewtonSchulzInput, SeesTheSmallestFloatThereIs) {
  at::Tensor x = at::zeros({3, 4}, at::kFloat);
  x[1][2] = std::numeric_limits<float>::denorm_min();
  const at::Tensor result = newton_schulz(x, {});
  EXPECT_NEAR(result[1][2].item<double>(), mapped(1, polar_express_coefficients(), 5), 1e-5);
}

TEST(NewtonSchulzInput, TakesFloat64BeyondTheRangeOfFloat32) {
  const at::Tensor x = random_matrix({2, 16, 48});
  for (double scale : {1e-200, 1.0, 1e200}) {
    EXPECT_LT(distance(newton_schulz(x * scale, {})[1], exact(x[1])), kTolerance) << scale;
  }
}

}  // namespace
}  // namespace dmuon

#include "kernels/newton_schulz.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/linalg_svdvals.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "engine/error.h"
#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Lt;
using ::testing::ThrowsMessage;

constexpr double kEpsilon = 0x1p-24;

// Five steps are some twenty products deep, and what each rounds off near zero grows by the slope
// that the polynomial has there: 804 for Polar Express, the steepest set.
constexpr double kTolerance = 20 * 804 * kEpsilon;

const CoefficientSet* const kSets[] = {&polar_express_coefficients(), &you_coefficients(),
                                       &jordan_coefficients()};

NewtonSchulz with(NsAlgorithm algorithm, NsDtype dtype = NsDtype::automatic) {
  NewtonSchulz options;
  options.algorithm = algorithm;
  options.dtype = dtype;
  return options;
}

at::Tensor float32(const at::Tensor& x) { return x.to(at::kFloat); }

at::Tensor exact(const at::Tensor& x, const NewtonSchulz& options = {}) {
  return newton_schulz_reference(x.to(at::kDouble), options);
}

double largest_singular_value(const at::Tensor& x) {
  return at::linalg_svdvals(x.to(at::kDouble)).max().item<double>();
}

TEST(Reference, IsThePolynomialOfTheSingularValues) {
  for (const CoefficientSet* set : kSets) {
    NewtonSchulz options;
    options.coefficients = *set;
    for (const auto& [name, x] : matrix_zoo(24, 60)) {
      EXPECT_LT(distance(newton_schulz_reference(x, options), by_svd(x, options)), 1e-12)
          << set->name << ", " << name;
    }
  }
}

TEST(Reference, FollowsEachSetPastItsEnd) {
  for (const CoefficientSet* set : kSets) {
    NewtonSchulz options;
    options.coefficients = *set;
    for (int steps : {1, 2, 4, 7, 11}) {
      options.steps = steps;
      options.restarts = {};
      const at::Tensor x = with_spectrum(falling(12, 1), 12, 20);
      EXPECT_LT(distance(newton_schulz_reference(x, options), by_svd(x, options)), 1e-11)
          << set->name << ", " << steps << " steps";
    }
  }
}

TEST(Reference, KeepsTheDtypeAndOrientationOfItsInput) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = random_matrix({2, 9, 4}).to(dtype);
    const at::Tensor result = newton_schulz_reference(x, {});
    EXPECT_EQ(result.scalar_type(), dtype);
    EXPECT_EQ(result.sizes(), x.sizes());
  }
}

TEST(NewtonSchulz, AgreesWithTheReferenceOnEverySpectrum) {
  for (const CoefficientSet* set : kSets) {
    for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
      NewtonSchulz options = with(algorithm);
      options.coefficients = *set;
      for (const auto& [name, x] : matrix_zoo(32, 128)) {
        const at::Tensor x32 = float32(x);
        EXPECT_LT(distance(newton_schulz(x32, options), exact(x32, options)), kTolerance)
            << set->name << ", " << name;
      }
    }
  }
}

// The worst measured, one large singular value over a flat tail at 256 x 1024, is 2.9e-3; with the
// default restart it is 1.6e-4.
TEST(NewtonSchulz, WithoutRestartErrsByLessThanFivePerMille) {
  NewtonSchulz options;
  options.restarts = {};
  for (const auto& [name, x] : matrix_zoo(32, 128)) {
    const at::Tensor x32 = float32(x);
    EXPECT_LT(distance(newton_schulz(x32, options), exact(x32, options)), 5e-3) << name;
  }
}

// Far below the slope's reach float32 decides what a singular value becomes: there only that none
// leaves the range of the exact ones is a claim.
TEST(NewtonSchulz, StaysInRangeHoweverManyTheSteps) {
  for (const CoefficientSet* set : kSets) {
    NewtonSchulz options;
    options.coefficients = *set;
    for (int steps : {3, 6, 8, 12, 20}) {
      options.steps = steps;
      const at::Tensor kind = float32(with_spectrum(falling(32, 3), 32, 128));
      const at::Tensor cruel = float32(with_spectrum(falling(32, 6), 32, 128));
      EXPECT_LT(distance(newton_schulz(kind, options), exact(kind, options)), 2e-3)
          << set->name << ", " << steps << " steps";
      EXPECT_LT(largest_singular_value(newton_schulz(cruel, options)),
                largest_singular_value(exact(cruel, options)) + 0.05)
          << set->name << ", " << steps << " steps";
    }
  }
}

TEST(NewtonSchulz, MovesSingularValuesIntoTheDocumentedInterval) {
  std::vector<double> sigma = falling(16, 1.5);  // the smallest is above 1e-2 of the Frobenius norm
  const at::Tensor x = float32(with_spectrum(sigma, 16, 48));
  const at::Tensor values = at::linalg_svdvals(newton_schulz(x, {}).to(at::kDouble));
  EXPECT_GT(values.min().item<double>(), .846 - 1e-3);
  EXPECT_LT(values.max().item<double>(), 1.124 + 1e-3);
}

// bfloat16 rounds its input by 2^-9, which the slope near zero amplifies in any implementation: the
// plain one sets the scale.
TEST(NewtonSchulz, InBfloat16ErrsAtMostTwiceAsMuchAsThePlainIteration) {
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    const NewtonSchulz options = with(algorithm, NsDtype::bfloat16);
    for (const auto& [name, x] : matrix_zoo(32, 256)) {
      const at::Tensor x32 = float32(x), want = exact(x32);
      const double plain = distance(newton_schulz_reference(x32.to(at::kBFloat16), {}), want);
      const at::Tensor got = newton_schulz(x32, options);
      EXPECT_LT(distance(got, want), 2 * plain) << name;
      EXPECT_LT(largest_singular_value(got), 1.2) << name;
    }
  }
}

TEST(NewtonSchulz, OfATransposeIsTheTranspose) {
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    for (NsDtype dtype : {NsDtype::float32, NsDtype::bfloat16}) {
      const double tolerance = dtype == NsDtype::float32 ? kTolerance : 2e-2;
      const at::Tensor x = float32(random_matrix({3, 12, 96}));
      const at::Tensor wide = newton_schulz(x, with(algorithm, dtype));
      const at::Tensor tall = newton_schulz(x.mT(), with(algorithm, dtype));
      EXPECT_TRUE(tall.is_contiguous());
      EXPECT_LT(distance(tall.mT(), wide), tolerance);
      EXPECT_LT(distance(newton_schulz(x[0].t(), with(algorithm, dtype)).t(), wide[0]), tolerance);
    }
  }
}

TEST(NewtonSchulz, TreatsEachMatrixOfABatchAsIfItWereAlone) {
  for (std::vector<int64_t> sizes : {std::vector<int64_t>{4, 16, 64}, {4, 64, 16}, {4, 16, 16}}) {
    const at::Tensor batch = float32(random_matrix(sizes));
    batch[1].mul_(1e-12);
    const at::Tensor result = newton_schulz(batch, {});
    for (int64_t i = 0; i < sizes[0]; ++i) {
      EXPECT_LT(distance(result[i], newton_schulz(batch[i], {})), kTolerance) << sizes[1];
    }
  }
}

TEST(NewtonSchulz, OfABatchOfOneIsBitwiseThatOfTheMatrix) {
  const at::Tensor x = float32(random_matrix({1, 40, 16}));
  EXPECT_TRUE(at::equal(newton_schulz(x, {})[0], newton_schulz(x[0], {})));
}

TEST(NewtonSchulz, IsBitwiseTheSameForAnyPowerOfTwo) {
  const at::Tensor x = float32(random_matrix({16, 48}));
  for (int exponent : {-90, -20, 7, 100}) {
    EXPECT_TRUE(at::equal(newton_schulz(x * std::ldexp(1.0, exponent), {}), newton_schulz(x, {})))
        << exponent;
  }
}

TEST(NewtonSchulz, KnowsNoScale) {
  const at::Tensor x = float32(random_matrix({16, 48}));
  for (double scale : {1e-30, 1e-18, 1e-7, 1e18, 1e30, 3e38}) {
    EXPECT_LT(distance(newton_schulz(x * scale, {}), exact(x)), kTolerance) << scale;
  }
}

TEST(NewtonSchulz, TakesFloat64BeyondTheRangeOfFloat32) {
  const at::Tensor x = random_matrix({2, 16, 48});
  for (double scale : {1e-200, 1.0, 1e200}) {
    EXPECT_LT(distance(newton_schulz(x * scale, {})[1], exact(x[1])), kTolerance) << scale;
  }
}

TEST(NewtonSchulz, SeesTheSmallestFloatThereIs) {
  at::Tensor x = at::zeros({3, 4}, at::kFloat);
  x[1][2] = std::numeric_limits<float>::denorm_min();
  const at::Tensor result = newton_schulz(x, {});
  EXPECT_NEAR(result[1][2].item<double>(), mapped(1, polar_express_coefficients(), 5), 1e-5);
}

TEST(NewtonSchulz, OfZeroIsZero) {
  at::Tensor batch = float32(random_matrix({3, 8, 32}));
  batch[1].zero_();
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    const at::Tensor result = newton_schulz(batch, with(algorithm));
    EXPECT_TRUE(at::equal(result[1], at::zeros({8, 32}, at::kFloat)));
    EXPECT_LT(distance(result[2], exact(batch[2])), kTolerance);
    EXPECT_TRUE(at::equal(newton_schulz(batch[1], with(algorithm)), result[1]));
  }
}

TEST(NewtonSchulz, OfAVectorIsItsDirectionTimesTheImageOfOne) {
  for (std::vector<int64_t> sizes : {std::vector<int64_t>{1, 50}, {50, 1}, {1, 1}, {2, 1, 7}}) {
    const at::Tensor x = float32(random_matrix(sizes));
    const at::Tensor norm = x.norm(2, at::IntArrayRef{-2, -1}, /*keepdim=*/true);
    const at::Tensor want = x / norm * mapped(1, polar_express_coefficients(), 5);
    EXPECT_LT(distance(newton_schulz(x, {}), want), 100 * kEpsilon) << x.sizes();
  }
}

TEST(NewtonSchulz, ReturnsEmptyForEmpty) {
  for (std::vector<int64_t> sizes :
       {std::vector<int64_t>{0, 5}, {5, 0}, {0, 0}, {0, 4, 8}, {3, 0, 8}}) {
    const at::Tensor x = at::zeros(sizes, at::kBFloat16);
    EXPECT_EQ(newton_schulz(x, {}).sizes(), at::IntArrayRef(sizes));
    EXPECT_EQ(newton_schulz(x, {}).scalar_type(), at::kFloat);
    EXPECT_EQ(newton_schulz_reference(x, {}).sizes(), at::IntArrayRef(sizes));
  }
}

TEST(NewtonSchulz, SpreadsNonFiniteInputOverItsOwnMatrixOnly) {
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

TEST(NewtonSchulz, ReadsAnyStridesAndLeavesItsInputAlone) {
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

TEST(NewtonSchulz, ReturnsFloat32ForEveryInputDtype) {
  for (at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor x = random_matrix({16, 64}).to(dtype);
    const at::Tensor result = newton_schulz(x, {});
    EXPECT_EQ(result.scalar_type(), at::kFloat);
    EXPECT_LT(distance(result, exact(x)), kTolerance) << dtype;
  }
}

TEST(NewtonSchulz, IsNotRecordedByAutograd) {
  const at::Tensor x = float32(random_matrix({8, 32})).requires_grad_();
  EXPECT_FALSE(newton_schulz(x, {}).requires_grad());
  EXPECT_FALSE(newton_schulz_reference(x, {}).requires_grad());
}

TEST(NewtonSchulzKernel, NamesWhatRuns) {
  EXPECT_EQ(newton_schulz_kernel(1, 256, 1024, {}), "gram/mm/float32");
  EXPECT_EQ(newton_schulz_kernel(8, 1024, 256, {}), "gram/bmm/float32");
  EXPECT_EQ(newton_schulz_kernel(1, 256, 1024, with(NsAlgorithm::direct)), "direct/mm/float32");
  EXPECT_EQ(newton_schulz_kernel(1, 64, 512, with(NsAlgorithm::gram, NsDtype::bfloat16)),
            "gram/mm/bfloat16");
  EXPECT_EQ(newton_schulz_kernel(0, 64, 512, {}), "none");
}

// Direct costs 20 a + 10, gram with one restart 8 a + 28, without any 4 a + 34 (short^3, aspect a).
TEST(NewtonSchulzKernel, IsDirectWhereGramCostsAsManyFlops) {
  NewtonSchulz free_running;
  free_running.restarts = {};
  EXPECT_EQ(newton_schulz_kernel(1, 100, 150, {}), "direct/mm/float32");
  EXPECT_EQ(newton_schulz_kernel(1, 100, 151, {}), "gram/mm/float32");
  EXPECT_EQ(newton_schulz_kernel(1, 150, 100, free_running), "direct/mm/float32");
  EXPECT_EQ(newton_schulz_kernel(1, 151, 100, free_running), "gram/mm/float32");
  EXPECT_EQ(newton_schulz_kernel(1, 100, 566, with(NsAlgorithm::gram, NsDtype::bfloat16)),
            "direct/mm/bfloat16");
}

TEST(NewtonSchulz, AgreesOnBothSidesOfTheChoiceOfKernel) {
  for (int64_t cols : {60, 61}) {
    const at::Tensor x = float32(with_spectrum(falling(40, 3), 40, cols));
    EXPECT_LT(distance(newton_schulz(x, {}), exact(x)), kTolerance) << cols;
  }
}

TEST(NewtonSchulzOptions, NameWhatIsWrong) {
  NewtonSchulz none, empty, late, early, direct;
  none.steps = 0;
  empty.coefficients = {"mine", {}, PastEnd::cycle};
  late.restarts = {2, 5};
  early.restarts = {0};
  direct = with(NsAlgorithm::direct);
  direct.steps = 1;
  EXPECT_THAT([&] { none.validate(); }, ThrowsMessage<ConfigError>(HasSubstr("steps = 0")));
  EXPECT_THAT([&] { empty.validate(); }, ThrowsMessage<ConfigError>(HasSubstr("'mine' has no")));
  EXPECT_THAT([&] { late.validate(); },
              ThrowsMessage<ConfigError>(HasSubstr("restart before step 5 of 5")));
  EXPECT_THAT([&] { early.validate(); },
              ThrowsMessage<ConfigError>(HasSubstr("restart before step 0 of 5")));
  EXPECT_NO_THROW(direct.validate()) << "direct has no restarts to misplace";
}

TEST(NewtonSchulz, RefusesWhatIsNoMatrixAndBadOptions) {
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

}  // namespace
}  // namespace dmuon

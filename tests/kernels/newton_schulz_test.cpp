#include "kernels/newton_schulz.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linalg_svdvals.h>
#include <gmock/gmock.h>

#include <cmath>

#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

const CoefficientSet* const kSets[] = {&polar_express_coefficients(), &you_coefficients(),
                                       &jordan_coefficients()};

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
      options.restarts = std::vector<int>{};
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
      options.restarts = std::vector{2};
      for (const auto& [name, x] : matrix_zoo(32, 128)) {
        const at::Tensor x32 = float32(x);
        EXPECT_LT(distance(newton_schulz(x32, options), exact(x32, options)), kTolerance)
            << set->name << ", " << name;
      }
    }
  }
}

// What the kernel makes of restarts that are left open: none from 128 on.
TEST(NewtonSchulz, LeftToItselfErrsByLessThanFivePerMille) {
  for (const auto& [name, x] : matrix_zoo(130, 300)) {
    const at::Tensor x32 = float32(x);
    EXPECT_LT(distance(newton_schulz(x32, {}), exact(x32)), 5e-3) << name;
  }
}

// Far below the slope's reach float32 decides what a singular value becomes: there only that none
// leaves the range of the exact ones is a claim.
TEST(NewtonSchulz, StaysInRangeHoweverManyTheSteps) {
  for (const CoefficientSet* set : kSets) {
    NewtonSchulz options;
    options.coefficients = *set;
    options.restarts = std::vector{2};
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

TEST(NewtonSchulz, AgreesOnBothSidesOfTheChoiceOfKernel) {
  for (int64_t cols : {60, 61}) {
    const at::Tensor x = float32(with_spectrum(falling(40, 3), 40, cols));
    EXPECT_LT(distance(newton_schulz(x, {}), exact(x)), kTolerance) << cols;
  }
}

}  // namespace
}  // namespace dmuon

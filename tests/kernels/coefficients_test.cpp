#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

struct Range {
  double low, high;
};

// Of the five-step map over singular values in [low, 1], 2,000 per decade.
Range range_of(const CoefficientSet& set, double low) {
  Range range{1e9, -1e9};
  for (double exponent = std::log10(low); exponent <= 0; exponent += 0.0005) {
    const double value = mapped(std::pow(10, exponent), set, 5);
    range = {std::min(range.low, value), std::max(range.high, value)};
  }
  return range;
}

TEST(PolarExpress, HasFiveRowsDampedByItsSafetyFactor) {
  const CoefficientSet& set = polar_express_coefficients();
  ASSERT_THAT(set.rows, SizeIs(5));
  EXPECT_THAT(set.rows[0],
              ElementsAre(DoubleEq(8.28721201814563 / 1.05),
                          DoubleEq(-23.595886519098837 / (1.05 * 1.05 * 1.05)),
                          DoubleEq(17.300387312530933 / (1.05 * 1.05 * 1.05 * 1.05 * 1.05))));
}

TEST(PolarExpress, RepeatsItsLastRow) {
  const CoefficientSet& set = polar_express_coefficients();
  EXPECT_EQ(set.row(4), set.rows[4]);
  EXPECT_EQ(set.row(5), set.rows[4]);
  EXPECT_EQ(set.row(11), set.rows[4]);
}

TEST(You, CyclesThroughItsFiveRows) {
  const CoefficientSet& set = you_coefficients();
  ASSERT_THAT(set.rows, SizeIs(5));
  EXPECT_THAT(set.row(6), ElementsAre(3.9505, -6.3029, 2.6377));
  EXPECT_EQ(set.row(10), set.rows[0]);
}

TEST(Jordan, IsOneRowForEver) {
  EXPECT_THAT(jordan_coefficients().row(7), ElementsAre(3.4445, -4.7750, 2.0315));
}

// The published three digits of each set's range over [1e-2, 1] of the Frobenius norm.
TEST(Coefficients, MapSingularValuesIntoTheDocumentedIntervals) {
  const auto check = [](const CoefficientSet& set, Range published) {
    const Range range = range_of(set, 1e-2);
    EXPECT_NEAR(range.low, published.low, 6e-4) << set.name;
    EXPECT_NEAR(range.high, published.high, 6e-4) << set.name;
  };
  check(polar_express_coefficients(), {.846, 1.124});
  check(you_coefficients(), {.978, 1.032});
  check(jordan_coefficients(), {.682, 1.134});
}

TEST(Coefficients, NeverFlipASign) {
  for (const CoefficientSet* set :
       {&polar_express_coefficients(), &you_coefficients(), &jordan_coefficients()}) {
    EXPECT_GT(range_of(*set, 1e-8).low, 0) << set->name;
  }
}

// Published sets that turn a direction round, or blow up one that is the whole matrix.
TEST(Coefficients, ThatFlipASignOrBlowUpAreRefused) {
  NewtonSchulz options;
  options.coefficients = {"aol",
                          {{4.0098, -7.0585, 2.4635},
                           {3.4585, -5.5479, 2.5959},
                           {2.7573, -3.2939, 1.4254},
                           {2.7215, -3.0494, 1.3169}}};
  EXPECT_THAT([&] { options.validate(); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("'aol'"), HasSubstr("within [0, 1.5]"))));
  options.coefficients = {"too steep", {{10, -1, 0}}};
  EXPECT_THAT([&] { options.validate(); }, ThrowsMessage<ConfigError>(HasSubstr("'too steep'")));
}

// In float32, as the kernels compute, they end in NaN.
TEST(Coefficients, ThatLeaveTheRangeOnTheWayAreRefused) {
  for (const double large : {1e4, 1e30, 1e200}) {
    NewtonSchulz options{.steps = 2};
    options.coefficients = {"there and back", {{large, 0, 0}, {1 / large, 0, 0}}};
    EXPECT_THAT([&] { options.validate(); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("'there and back'"), HasSubstr("way"))));
  }
}

TEST(Coefficients, AndStepsWithoutEndAreRefusedAtOnce) {
  NewtonSchulz options{.steps = 2'000'000'000};
  EXPECT_THAT([&] { options.validate(); }, ThrowsMessage<ConfigError>(HasSubstr("1 to 1000")));
  options.steps = 5;
  options.coefficients.rows.assign(1001, {1, 0, 0});
  EXPECT_THAT([&] { options.validate(); }, ThrowsMessage<ConfigError>(HasSubstr("1001 rows")));
}

TEST(Coefficients, OfOursAreAcceptedForAnyNumberOfSteps) {
  for (const CoefficientSet* set :
       {&polar_express_coefficients(), &you_coefficients(), &jordan_coefficients()}) {
    NewtonSchulz options;
    options.coefficients = *set;
    for (options.steps = 1; options.steps <= 20; ++options.steps) {
      EXPECT_NO_THROW(options.validate()) << set->name << ", " << options.steps;
    }
  }
}

}  // namespace
}  // namespace dmuon

#include "kernels/adamw.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cmath>

namespace dmuon {
namespace {

// The formula of the header, for one number in double precision.
double updated(double w, double g, double& m, double& v, const AdamwSettings& s) {
  w *= 1 - s.lr * s.weight_decay;
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
  const double denominator = std::sqrt(v) / std::sqrt(1 - std::pow(s.beta2, s.step)) + s.eps;
  return w - s.lr / (1 - std::pow(s.beta1, s.step)) * m / denominator;
}

TEST(Adamw, FollowsItsFormulaOverManySteps) {
  AdamwSettings settings{
      .lr = 0.01, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .step = 0};
  at::Tensor weight = at::full({3, 2}, 0.7, at::kFloat);
  at::Tensor exp_avg = at::zeros({3, 2}), exp_avg_sq = at::zeros({3, 2});
  double w = 0.7, m = 0, v = 0;
  for (int step = 1; step <= 30; ++step) {
    settings.step = step;
    const double gradient = std::cos(step);
    w = updated(w, static_cast<float>(gradient), m, v, settings);
    adamw_update(weight, at::full({3, 2}, gradient, at::kFloat), exp_avg, exp_avg_sq, settings);
    // A dozen roundings of float32 per step, none of them amplified.
    EXPECT_NEAR(weight[2][1].item<double>(), w, step * 12 * 6e-8);
  }
}

TEST(Adamw, TakesAGradientOfAnotherDtype) {
  const AdamwSettings settings{
      .lr = 0.5, .weight_decay = 0, .beta1 = 0.9, .beta2 = 0.99, .eps = 0, .step = 1};
  at::Tensor weight = at::zeros({4}), exp_avg = at::zeros({4}), exp_avg_sq = at::zeros({4});
  adamw_update(weight, at::full({4}, 2, at::kBFloat16), exp_avg, exp_avg_sq, settings);
  EXPECT_NEAR(weight[0].item<double>(), -0.5, 1e-6);  // the first step is lr times the sign
  EXPECT_EQ(exp_avg.scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace dmuon

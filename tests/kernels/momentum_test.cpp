#include "kernels/momentum.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include <cmath>

#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

// Results are sums of two terms of magnitude at most 2, each rounded once or twice in float32.
constexpr double kTolerance = 4 * 2 * 0x1p-24;

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

at::Tensor float32(std::vector<int64_t> sizes, uint64_t seed) {
  return random_matrix(std::move(sizes), seed).to(at::kFloat);
}

void expect_momentum(at::Tensor buf, const at::Tensor& grad, bool nesterov, at::Tensor u) {
  const at::Tensor wide = grad.to(at::kDouble).clone();
  const at::Tensor want_buf = buf.to(at::kDouble) * 0.95 + wide;
  const at::Tensor want_u = nesterov ? wide + want_buf * 0.95 : want_buf;
  momentum_update(buf, grad, 0.95, nesterov, u);
  EXPECT_LE(largest_difference(buf, want_buf), kTolerance);
  EXPECT_LE(largest_difference(u, want_u), kTolerance);
}

TEST(MomentumUpdate, IsTheFormulaForEveryDtypeAndLayout) {
  for (bool nesterov : {false, true}) {
    const at::Tensor grad = float32({37, 91}, 1);
    for (const at::Tensor& g : {grad, grad.to(at::kBFloat16), grad.to(at::kHalf),
                                grad.t().contiguous().t(), grad.to(at::kDouble)}) {
      expect_momentum(float32({37, 91}, 2), g, nesterov, at::empty({37, 91}, at::kFloat));
    }
    expect_momentum(float32({91, 37}, 2).t(), grad, nesterov, at::empty({37, 91}, at::kFloat));
  }
}

TEST(MomentumUpdate, MayOverwriteItsGradient) {
  for (bool nesterov : {false, true}) {
    at::Tensor grad = float32({5, 7}, 1), apart = at::empty({5, 7}, at::kFloat);
    at::Tensor buf = float32({5, 7}, 2), other = buf.clone();
    momentum_update(other, grad, 0.9, nesterov, apart);
    momentum_update(buf, grad, 0.9, nesterov, grad);
    EXPECT_TRUE(at::equal(grad, apart));
    EXPECT_TRUE(at::equal(buf, other));
  }
}

TEST(MomentumUpdate, GivesTheSameBitsInAnyCut) {
  at::Tensor buf = float32({1003}, 1), pieces = buf.clone();
  const at::Tensor grad = float32({1003}, 2);
  at::Tensor u = at::empty_like(buf), cut = at::empty_like(buf);
  momentum_update(buf, grad, 0.95, true, u);
  for (int64_t begin = 0; begin < 1003; begin += 17) {
    const int64_t end = std::min<int64_t>(begin + 17, 1003);
    at::Tensor b = pieces.slice(0, begin, end), out = cut.slice(0, begin, end);
    momentum_update(b, grad.slice(0, begin, end), 0.95, true, out);
  }
  EXPECT_TRUE(at::equal(u, cut));
  EXPECT_TRUE(at::equal(buf, pieces));
}

TEST(MomentumUpdate, WithoutMomentumPassesTheGradientOn) {
  at::Tensor buf = float32({6, 6}, 1), u = at::empty_like(buf);
  const at::Tensor grad = float32({6, 6}, 2);
  momentum_update(buf, grad, 0, true, u);
  EXPECT_TRUE(at::equal(u, grad));
  EXPECT_TRUE(at::equal(buf, grad));
}

TEST(ApplyUpdate, DecaysThenSubtracts) {
  for (bool transposed : {false, true}) {
    at::Tensor weight = transposed ? float32({33, 65}, 1).t() : float32({65, 33}, 1);
    const at::Tensor o = float32({65, 33}, 2);
    const at::Tensor want =
        weight.to(at::kDouble) * (1 - 0.02 * 0.1) - o.to(at::kDouble) * (0.02 * 1.6);
    apply_update(weight, o, 0.02, 0.1, 1.6);
    EXPECT_LE(largest_difference(weight, want), kTolerance);
  }
}

TEST(ApplyUpdate, WritesThroughAParameterThatRequiresGrad) {
  at::Tensor weight = float32({3, 3}, 1).requires_grad_();
  const at::Tensor before = weight.detach().clone();
  apply_update(weight, float32({3, 3}, 2), 0, 0.5, 1);
  EXPECT_TRUE(at::equal(weight.detach(), before)) << "lr = 0 changes nothing";
  EXPECT_TRUE(weight.is_leaf());
}

TEST(AdjustedScale, IsThatOfTorchsMuon) {
  EXPECT_DOUBLE_EQ(adjusted_scale(AdjustLr::match_rms_adamw, 64, 256), 0.2 * 16);
  EXPECT_DOUBLE_EQ(adjusted_scale(AdjustLr::match_rms_adamw, 256, 64), 0.2 * 16);
  EXPECT_DOUBLE_EQ(adjusted_scale(AdjustLr::original, 256, 64), 2);
  EXPECT_DOUBLE_EQ(adjusted_scale(AdjustLr::original, 64, 256), 1);
  EXPECT_DOUBLE_EQ(adjusted_scale(AdjustLr::spectral_unclamped, 256, 64), 2);
  EXPECT_DOUBLE_EQ(adjusted_scale(AdjustLr::spectral_unclamped, 64, 256), 0.5);
}

}  // namespace
}  // namespace dmuon

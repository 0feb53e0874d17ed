// Every shape class at every level of instructions, against the float64 iteration.
#include "kernels/newton_schulz.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <algorithm>

#include "kernels/cpu/list.h"
#include "tests/kernels/cpu/every_isa.h"
#include "tests/kernels/matrices.h"

namespace dmuon::cpu {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

const CoefficientSet* const kSets[] = {&polar_express_coefficients(), &you_coefficients(),
                                       &jordan_coefficients()};

class Kernels : public EveryIsa {};

double error_of(const at::Tensor& x, const NewtonSchulz& options = {}) {
  return distance(newton_schulz(x, options), exact(x, options));
}

TEST_P(Kernels, OrthogonaliseEveryShape) {
  const std::vector<std::vector<int64_t>> shapes = {
      {1, 1},   {1, 40},  {40, 1},   {2, 3},    {17, 17},    {64, 64},    {31, 37},  {127, 131},
      {96, 24}, {24, 96}, {33, 300}, {300, 33}, {3, 20, 50}, {3, 50, 20}, {2, 1, 9}, {1, 48, 32}};
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    for (const auto& sizes : shapes) {
      const at::Tensor x = float32(random_matrix(sizes));
      EXPECT_LT(error_of(x, with(algorithm)), kTolerance) << at::IntArrayRef(sizes);
    }
  }
}

// Deeper than one block of the products' depth, and more rows than one block of theirs.
TEST_P(Kernels, OrthogonaliseWhatExceedsEveryBlock) {
  for (std::vector<int64_t> sizes : {std::vector<int64_t>{270, 290}, {270, 820}, {820, 270}}) {
    EXPECT_LT(error_of(float32(random_matrix(sizes))), kTolerance) << at::IntArrayRef(sizes);
  }
}

TEST_P(Kernels, FollowEverySetForOneToTenSteps) {
  for (const CoefficientSet* set : kSets) {
    for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
      NewtonSchulz options = with(algorithm);
      options.coefficients = *set;
      for (options.steps = 1; options.steps <= 10; ++options.steps) {
        EXPECT_LT(error_of(float32(random_matrix({20, 70})), options), kTolerance)
            << set->name << ", " << options.steps << " steps";
      }
    }
  }
}

TEST_P(Kernels, TakeTheRestartsTheyAreGiven) {
  NewtonSchulz options;
  for (const std::vector<int>& restarts : {std::vector<int>{}, {1}, {2}, {2, 4}, {1, 2, 3, 4}}) {
    options.restarts = restarts;
    EXPECT_LT(error_of(float32(random_matrix({40, 130})), options), kTolerance);
  }
  const at::Tensor cruel = float32(matrix_zoo(32, 128).back().second);
  options.restarts = std::vector<int>{};
  const double without = error_of(cruel, options);
  options.restarts = std::vector{2};
  EXPECT_LT(error_of(cruel, options), without / 10) << "a restart is what makes it exact";
}

// The plain iteration in float32 sets the scale, on every spectrum. The Gram form's products are
// larger by the polynomial's slope at zero; two restarts leave its cube root.
void expect_twice_the_plain_error(int64_t cols, const NewtonSchulz& options) {
  for (const auto& [name, x] : matrix_zoo(40, cols)) {
    const at::Tensor x32 = float32(x), want = exact(x32);
    const double plain = distance(newton_schulz_reference(x32, {}), want);
    EXPECT_LT(distance(newton_schulz(x32, options), want), 2 * plain + 4 * kEpsilon) << name;
  }
}

TEST_P(Kernels, DirectErrsAtMostTwiceAsMuchAsThePlainIteration) {
  expect_twice_the_plain_error(44, with(NsAlgorithm::direct));
}

TEST_P(Kernels, GramWithTwoRestartsErrsAtMostTwiceAsMuchAsThePlainIteration) {
  NewtonSchulz options;
  options.restarts = {1, 3};
  expect_twice_the_plain_error(160, options);
}

TEST_P(Kernels, InBfloat16ErrAtMostTwiceAsMuchAsThePlainIteration) {
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    for (const auto& [name, x] : matrix_zoo(40, 300)) {
      const at::Tensor x32 = float32(x), want = exact(x32);
      const double plain = distance(newton_schulz_reference(x32.to(at::kBFloat16), {}), want);
      EXPECT_LT(distance(newton_schulz(x32, with(algorithm, NsDtype::bfloat16)), want), 2 * plain)
          << name;
    }
  }
}

TEST_P(Kernels, HoldOnEverySpectrum) {
  for (const auto& [name, x] : matrix_zoo(40, 160)) {
    EXPECT_LT(error_of(float32(x)), kTolerance) << name;
    EXPECT_LT(error_of(float32(x), with(NsAlgorithm::direct)), kTolerance) << name;
  }
  const at::Tensor repeated = float32(with_spectrum({1, 1, 1, .5, .5, .1, .1, .1}, 8, 30));
  EXPECT_LT(error_of(repeated), kTolerance);
}

TEST_P(Kernels, KnowNoScale) {
  const at::Tensor x = float32(random_matrix({16, 48}));
  for (double scale : {1e-38, 1e-30, 1e-7, 1e30, 1e37}) {
    EXPECT_LT(distance(newton_schulz(x * scale, {}), exact(x)), kTolerance) << scale;
  }
}

TEST_P(Kernels, SpreadNonFiniteInputOverItsOwnMatrixOnly) {
  for (NsAlgorithm algorithm : {NsAlgorithm::gram, NsAlgorithm::direct}) {
    for (double bad : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
      at::Tensor batch = float32(random_matrix({3, 8, 32}));
      batch[1][7][31] = bad;
      const at::Tensor result = newton_schulz(batch, with(algorithm));
      EXPECT_TRUE(at::isnan(result[1]).all().item<bool>());
      EXPECT_LT(distance(result[2], exact(batch[2])), kTolerance);
    }
  }
}

TEST_P(Kernels, ReadAndWriteEveryDtypeAndMayDoItInPlace) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double rounding = dtype == at::kFloat ? 0 : dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    for (std::vector<int64_t> sizes : {std::vector<int64_t>{30, 100}, {100, 30}, {50, 50}}) {
      for (const std::vector<int>& restarts : {std::vector<int>{}, {2}}) {
        NewtonSchulz options;
        options.restarts = restarts;
        const at::Tensor x = random_matrix(sizes).to(dtype), want = exact(x);
        NsWorkspace workspace;
        newton_schulz({{x, x}}, options, workspace);
        EXPECT_LT(distance(x, want), kTolerance + rounding) << dtype << at::IntArrayRef(sizes);
      }
    }
  }
}

TEST_P(Kernels, GiveTheSameBitsForAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (std::vector<int64_t> sizes :
       {std::vector<int64_t>{70, 300}, {300, 70}, {90, 100}, {5, 20, 60}}) {
    const at::Tensor x = float32(random_matrix(sizes));
    at::set_num_threads(1);
    const at::Tensor want = newton_schulz(x, {});
    for (int threads : {2, 3, 4}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(at::equal(newton_schulz(x, {}), want)) << threads << at::IntArrayRef(sizes);
    }
  }
  at::set_num_threads(before);
}

TEST_P(Kernels, GiveAListTheBitsOfItsMatrices) {
  const int before = at::get_num_threads();
  std::vector<NsJob> jobs;
  for (std::vector<int64_t> sizes :
       {std::vector<int64_t>{90, 200}, {7, 9}, {0, 5}, {2, 40, 40}, {60, 20}, {1, 1}}) {
    const at::Tensor x = float32(random_matrix(sizes));
    jobs.push_back({x, at::empty_like(x)});
  }
  for (int threads : {1, 2, 4}) {
    at::set_num_threads(threads);
    NsWorkspace workspace;
    newton_schulz(jobs, {}, workspace);
    at::set_num_threads(1);
    for (const NsJob& job : jobs) EXPECT_TRUE(at::equal(job.out, newton_schulz(job.in, {})));
  }
  at::set_num_threads(before);
}

INSTANTIATE_TEST_SUITE_P(Levels, Kernels, ::testing::ValuesIn(available_isas()), name_of);

TEST(NsWorkspace, GrowsOnTheFirstCallOnly) {
  NsWorkspace workspace;
  EXPECT_EQ(workspace.bytes(), 0);
  const at::Tensor x = float32(random_matrix({40, 130})), small = float32(random_matrix({9, 9}));
  newton_schulz({{x, x}, {small, small}}, {}, workspace);
  const int64_t bytes = workspace.bytes();
  const float* memory = workspace.arenas(1)[0].take(0);
  EXPECT_GT(bytes, 0);
  newton_schulz({{small, small}}, {}, workspace);
  newton_schulz({{x, x}}, {}, workspace);
  EXPECT_EQ(workspace.bytes(), bytes);
  EXPECT_EQ(workspace.arenas(1)[0].take(0), memory);
}

TEST(SharedFirst, SharesWhatWouldKeepOneThreadBusyAlone) {
  EXPECT_EQ(shared_first({100}, 2), 1) << "one matrix";
  EXPECT_EQ(shared_first({1, 1, 1, 1}, 2), 0) << "evenly divisible";
  EXPECT_EQ(shared_first({100, 1, 1, 1, 1}, 2), 1) << "one large one";
  EXPECT_EQ(shared_first({10, 10, 10}, 2), 1) << "an odd one";
  EXPECT_EQ(shared_first({5, 4, 3}, 1), 0) << "one thread";
  EXPECT_EQ(shared_first({}, 4), 0);
}

}  // namespace
}  // namespace dmuon::cpu

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>
#include <set>

#include "kernels/cuda/matmul_call.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/problem.h"
#include "tests/kernels/cuda_interpreter.h"
#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

using cuda::BlockList;
using cuda::Element;
using cuda::Machine;
using cuda::make_plan;
using cuda::MatmulCall;
using cuda::Name;
using cuda::Plan;
using cuda::plan_with;
using cuda::Problem;
using cuda::Product;
using testing::AllOf;
using testing::ElementsAre;
using testing::Ge;
using testing::Le;

at::ScalarType dtype_of(Element element) {
  if (element == Element::float16) return at::kHalf;
  return element == Element::bfloat16 ? at::kBFloat16 : at::kFloat;
}

// Blocks small enough to interpret.
const Machine kSmall{.block_multiple = 8, .library_bytes = 0};

// Some twenty products deep, each rounded to `element`, where no singular value is close to zero.
double tolerance(Element element) {
  if (element == Element::float32) return kTolerance;
  return 20 * (element == Element::float16 ? 0x1p-11 : 0x1p-8);
}

Problem in(Element precision, Problem problem) {
  problem.x = precision;
  return problem;
}

Problem problem_of_shape(int64_t batch, int64_t rows, int64_t cols,
                         Element precision = Element::float16) {
  return in(precision, cuda::problem_of(batch, rows, cols, {}));
}

Problem problem_of(const at::Tensor& x, const NewtonSchulz& options, Element precision) {
  return in(precision, cuda::problem_of(x, options));
}

double error_of(const at::Tensor& x, Element precision, bool gram, int blocks) {
  const NewtonSchulz options;
  const at::Tensor x32 = float32(x).contiguous();
  const Plan plan = plan_with(problem_of(x32, options, precision), kSmall, gram, blocks);
  return distance(interpret(plan, x32), exact(x32, options));
}

// Twice what plain torch makes of the direct form in the same precision.
double error_allowed(const at::Tensor& x, Element precision) {
  const at::Tensor rounded = x.to(dtype_of(precision));
  return 2 * distance(newton_schulz_reference(rounded, {}), exact(float32(x), {}));
}

TEST(CudaPlan, ErrsAtMostTwiceAsMuchAsTheDirectFormInTorch) {
  for (Element precision : {Element::float16, Element::bfloat16}) {
    for (const auto& [name, x] : matrix_zoo(24, 100)) {
      for (bool gram : {false, true}) {
        EXPECT_LT(error_of(x, precision, gram, 1), error_allowed(x, precision))
            << name << ", " << static_cast<int>(precision) << (gram ? ", gram" : ", direct");
      }
    }
  }
}

TEST(CudaPlan, InFloat32AgreesWithTheReference) {
  for (const auto& [name, x] : matrix_zoo(40, 24)) {
    for (bool gram : {false, true}) {
      EXPECT_LT(error_of(x, Element::float32, gram, 1), kTolerance) << name << ", gram " << gram;
    }
  }
}

TEST(CudaPlan, BlocksComputeTheSameForEveryCut) {
  for (int blocks : {4, 5, 6, 7, 8}) {
    const bool gram = blocks % 2 == 0;
    const at::Tensor x =
        random_matrix(gram ? std::vector<int64_t>{70, 95} : std::vector<int64_t>{95, 70});
    EXPECT_LT(error_of(x, Element::float16, gram, blocks), error_allowed(x, Element::float16))
        << blocks << " blocks";
  }
}

TEST(CudaPlan, TakesAnyShape) {
  const std::vector<std::vector<int64_t>> shapes = {{1, 1},  {1, 40},  {40, 1},     {3, 5},
                                                    {17, 4}, {37, 37}, {2, 13, 29}, {3, 29, 12}};
  for (const auto& shape : shapes) {
    const at::Tensor x = random_matrix(shape);
    for (Element precision : {Element::float16, Element::float32}) {
      const bool gram = shape.front() % 2 == 1;
      EXPECT_LT(error_of(x, precision, gram, 1), tolerance(precision)) << x.sizes();
    }
  }
}

TEST(CudaPlan, ScaleDoesNotMatter) {
  const at::Tensor x = float32(random_matrix({20, 50}));
  const at::Tensor scaled = at::stack({x, x * 0x1p-100, x * 0x1p120});
  for (Element precision : {Element::float16, Element::bfloat16, Element::float32}) {
    const at::Tensor out =
        interpret(plan_with(problem_of(scaled, {}, precision), kSmall, true, 1), scaled);
    EXPECT_TRUE(at::equal(out[0], out[1]));
    EXPECT_TRUE(at::equal(out[0], out[2]));
  }
}

TEST(CudaPlan, ZerosStayZeroAndOneNaNTakesItsWholeMatrixAndNoOther) {
  at::Tensor x = float32(random_matrix({4, 10, 70}));
  const at::Tensor clean = x.clone();
  x[1].zero_();
  x[2][9][69].fill_(std::numeric_limits<float>::quiet_NaN());
  x[3][0][0].fill_(-std::numeric_limits<float>::infinity());
  for (int blocks : {1, 4}) {
    const Plan plan = plan_with(problem_of(x, {}, Element::float16), kSmall, true, blocks);
    const at::Tensor out = interpret(plan, x);
    EXPECT_TRUE(at::equal(out[0], interpret(plan, clean)[0]));
    EXPECT_TRUE(at::equal(out[1], at::zeros({10, 70})));
    EXPECT_TRUE(at::isnan(out[2]).all().item<bool>());
    EXPECT_TRUE(at::isnan(out[3]).all().item<bool>());
  }
}

TEST(CudaPlan, FollowsOtherStepsRestartsAndCoefficients) {
  const at::Tensor x = float32(random_matrix({16, 48}));
  for (int steps : {1, 2, 7, 10}) {
    NewtonSchulz options;
    options.coefficients = you_coefficients();
    options.steps = steps;
    options.restarts = std::vector<int>();
    const Plan plan = plan_with(problem_of(x, options, Element::float16), kSmall, true, 1);
    EXPECT_LT(distance(interpret(plan, x), exact(x, options)), tolerance(Element::float16))
        << steps << " steps";
  }
}

TEST(CudaPlan, ChainsOfFloat16AreShort) {
  EXPECT_THAT(cuda::bounds_of_chains({2}, 5, 3), ElementsAre(0, 2, 5));
  EXPECT_THAT(cuda::bounds_of_chains({}, 5, 3), ElementsAre(0, 3, 5));
  EXPECT_THAT(cuda::bounds_of_chains({}, 10, 5), ElementsAre(0, 5, 10));
  EXPECT_THAT(cuda::bounds_of_chains({1, 4}, 1, 3), ElementsAre(0, 1));
}

// An entry is at most 1, and on average 1 / sqrt(rows cols); float16 is normal from 2^-14 to 2^15.
TEST(CudaPlan, LiftsFloat16OutOfTheSubnormalRange) {
  for (auto [rows, cols, shift] : {std::tuple{1, 1, 0},
                                   {16, 16, 2},
                                   {1024, 4096, 9},
                                   {8192, 28672, 12},
                                   {1 << 20, 1 << 20, 14}}) {
    EXPECT_EQ(plan_with(problem_of_shape(1, rows, cols), {}, true, 1).x_shift, shift);
  }
  EXPECT_EQ(plan_with(problem_of_shape(1, 1024, 4096, Element::bfloat16), {}, true, 1).x_shift, 0);
}

TEST(CudaPlan, IsDirectNearASquareAndGramWhereAMatrixIsWide) {
  EXPECT_FALSE(make_plan(problem_of_shape(1, 4096, 4096), {}).gram);
  EXPECT_FALSE(make_plan(problem_of_shape(8, 1024, 1024), {}).gram);
  EXPECT_TRUE(make_plan(problem_of_shape(1, 4096, 14336), {}).gram);
  EXPECT_TRUE(make_plan(problem_of_shape(1, 28672, 8192), {}).gram);
  Problem problem = problem_of_shape(1, 4096, 14336);
  problem.gram = false;
  EXPECT_FALSE(make_plan(problem, {}).gram);
}

TEST(CudaPlan, CutsOnlyMatricesThatFillTheMachineWithBlocks) {
  EXPECT_EQ(make_plan(problem_of_shape(1, 512, 2048), {}).blocks, 1);
  EXPECT_THAT(make_plan(problem_of_shape(1, 8192, 8192), {}).blocks, AllOf(Ge(4), Le(8)));
  EXPECT_THAT(make_plan(problem_of_shape(16, 2048, 8192), {}).blocks, AllOf(Ge(4), Le(8)));
  EXPECT_EQ(make_plan(problem_of_shape(1, 8192, 8192), {.pointer_arrays = false}).blocks, 1);
}

std::vector<Plan> plans_of(int64_t batch, int64_t rows, int64_t cols) {
  std::vector<Plan> plans;
  for (Element precision : {Element::float16, Element::bfloat16, Element::float32}) {
    for (bool gram : {false, true}) {
      for (int blocks : {1, 4, 7}) {
        plans.push_back(
            plan_with(problem_of_shape(batch, rows, cols, precision), {}, gram, blocks));
      }
    }
  }
  return plans;
}

std::vector<Plan> some_plans() {
  std::vector<Plan> plans = plans_of(1, 1000, 2501);
  for (const Plan& plan : plans_of(3, 1024, 257)) plans.push_back(plan);
  return plans;
}

TEST(CudaPlan, MatricesShareNoByte) {
  for (const Plan& plan : some_plans()) {
    std::vector<std::pair<int64_t, int64_t>> ranges = {
        {plan.partials, 8 * plan.problem.batch * plan.chunks},
        {plan.factors, 8 * plan.problem.batch},
        {plan.library, Machine{}.library_bytes}};
    for (const BlockList& list : plan.lists) ranges.emplace_back(list.pointers, 32 * list.size());
    for (int i = static_cast<int>(Name::x); i < cuda::kNames; ++i) {
      const cuda::Matrix& matrix = plan[static_cast<Name>(i)];
      const int64_t bytes = plan.problem.batch * matrix.elements() * bytes_of(matrix.element);
      if (bytes > 0) ranges.emplace_back(matrix.offset, bytes);
    }
    std::sort(ranges.begin(), ranges.end());
    int64_t end = 0;
    for (const auto& [offset, bytes] : ranges) {
      EXPECT_GE(offset, end);
      end = offset + bytes;
    }
    EXPECT_LE(end, plan.workspace_bytes);
  }
}

TEST(CudaPlan, EveryOperandBeginsAtSixteenBytesAndFitsItsMatrix) {
  for (const Plan& plan : some_plans()) {
    for (const cuda::Step& step : plan.steps) {
      const auto* product = std::get_if<Product>(&step);
      if (product == nullptr) continue;
      const MatmulCall call = column_major(plan, *product);
      EXPECT_GE(call.alignment, 16);
      EXPECT_GE(call.lda, call.transpose_a ? call.k : call.m);
      EXPECT_GE(call.ldb, call.transpose_b ? call.n : call.k);
      EXPECT_GE(call.ldd, call.m);
    }
  }
}

// 4 for each symmetric matrix: (i, j), j <= i, once and in whole blocks.
TEST(CudaPlan, BlocksCoverTheLowerTriangleOfEveryMatrixOnce) {
  const Plan plan = plan_with(problem_of_shape(3, 300, 400), {}, true, 5);
  const BlockList& list = plan.lists.front();
  const cuda::Matrix& d = plan[Name::r];
  std::set<std::tuple<int64_t, int64_t, int64_t>> seen;
  for (int64_t i = 0; i < list.size(); ++i) {
    const int64_t element = (block_offsets(list, i).d - d.offset) / bytes_of(d.element);
    const int64_t in_matrix = element % d.elements(), block = d.rows / 5;
    seen.emplace(element / d.elements(), in_matrix / d.cols / block, in_matrix % d.cols / block);
    EXPECT_EQ(in_matrix / d.cols % block, 0);
    EXPECT_EQ(in_matrix % d.cols % block, 0);
    EXPECT_LE(in_matrix % d.cols, in_matrix / d.cols);
  }
  EXPECT_EQ(seen.size(), 3 * 15U);
}

TEST(LowerBlock, CountsRowByRow) {
  int64_t index = 0;
  for (int64_t row = 0; row < 2000; ++row) {
    for (int64_t col = 0; col <= row; col += std::max<int64_t>(row, 1)) {
      index = cuda::lower_blocks(row) + col;
      EXPECT_EQ(cuda::lower_block(index).row, row);
      EXPECT_EQ(cuda::lower_block(index).col, col);
    }
  }
}

}  // namespace
}  // namespace dmuon

// What cuBLASLt itself says of our products where it needs no GPU to say it.
#include <gmock/gmock.h>

#include "kernels/cuda/lt_matmul.h"
#include "kernels/cuda/problem.h"
#include "kernels/device_newton_schulz.h"

namespace dmuon {
namespace {

using cuda::Element;

cuda::Problem problem_of_shape(int64_t batch, int64_t rows, int64_t cols, Element precision) {
  cuda::Problem problem = cuda::problem_of(batch, rows, cols, {});
  problem.x = precision;
  return problem;
}

void expect_accepted(const cuda::Plan& plan) {
  for (const cuda::Step& step : plan.steps) {
    const auto* product = std::get_if<cuda::Product>(&step);
    if (product == nullptr) continue;
    EXPECT_NO_THROW(cuda::LtMatmul(column_major(plan, *product)));
  }
}

TEST(WithoutADevice, EveryProductIsAKindThatCublasLtHasDescriptorsFor) {
  for (Element precision : {Element::float16, Element::bfloat16, Element::float32}) {
    for (bool gram : {false, true}) {
      for (int blocks : {1, 4, 8}) {
        expect_accepted(plan_with(problem_of_shape(1, 2048, 8192, precision), {}, gram, blocks));
        expect_accepted(plan_with(problem_of_shape(3, 3000, 701, precision), {}, gram, blocks));
      }
    }
  }
}

TEST(WithoutADevice, TheLibraryLoadsAndIsOfThisBuild) {
  EXPECT_NO_THROW(load_device_newton_schulz(DMUON_CUDA_LIBRARY));
}

}  // namespace
}  // namespace dmuon

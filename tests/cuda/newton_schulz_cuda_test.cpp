#include "kernels/cuda/newton_schulz_cuda.h"

#include <ATen/TensorOperators.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include <limits>

#include "kernels/cuda/problem.h"
#include "kernels/device_newton_schulz.h"
#include "tests/cuda/graph.h"
#include "tests/kernels/matrices.h"

namespace dmuon {
namespace {

using cuda::Element;
using cuda::Executor;
using cuda::Machine;
using cuda::Problem;

at::Tensor on_gpu(const at::Tensor& x, at::ScalarType dtype = at::kFloat) {
  return x.to(at::TensorOptions().device(at::kCUDA).dtype(dtype));
}

double error_of(const at::Tensor& result, const at::Tensor& x, const NewtonSchulz& options = {}) {
  return distance(result.cpu(), exact(x, options));
}

// Twice what torch's own products make of the direct iteration in the same dtype.
double error_allowed(const at::Tensor& x, at::ScalarType dtype, const NewtonSchulz& options = {}) {
  return 2 * error_of(newton_schulz_reference(on_gpu(x, dtype), options), x, options);
}

struct Precision {
  const char* name;
  NsDtype choice;
  at::ScalarType dtype;
};

const Precision kPrecisions[] = {{"float16", NsDtype::automatic, at::kHalf},
                                 {"bfloat16", NsDtype::bfloat16, at::kBFloat16},
                                 {"float32", NsDtype::float32, at::kFloat}};

// By this plan, whether it would be chosen or not.
at::Tensor run_plan(const at::Tensor& x, const NewtonSchulz& options, bool gram, int blocks) {
  const Machine machine = cuda::current_machine();
  const auto executor =
      Executor::make(plan_with(cuda::problem_of(x, options), machine, gram, blocks),
                     at::cuda::getCurrentCUDABlasLtHandle(), machine);
  EXPECT_TRUE(executor.has_value()) << "cuBLASLt has no algorithm; blocks " << blocks;
  return executor ? cuda::run(*executor, x) : at::zeros_like(x);
}

double allowed_for(const at::Tensor& x, const Precision& precision) {
  return precision.dtype == at::kFloat ? kTolerance : error_allowed(x, precision.dtype);
}

void expect_every_plan_agrees(const std::string& name, const at::Tensor& x) {
  for (const Precision& precision : kPrecisions) {
    NewtonSchulz options;
    options.dtype = precision.choice;
    const double allowed = allowed_for(x, precision);
    for (bool gram : {false, true}) {
      for (int blocks : {1, 4, 8}) {
        const at::Tensor result = run_plan(on_gpu(x), options, gram, blocks);
        EXPECT_LT(error_of(result, x), allowed)
            << name << " " << x.sizes() << ", " << precision.name << ", gram " << gram << ", "
            << blocks << " blocks";
      }
    }
  }
}

TEST(NewtonSchulzCuda, EveryPlanAgreesWithTheOracleOnEverySpectrum) {
  for (const auto& [name, x] : matrix_zoo(256, 1024)) {
    expect_every_plan_agrees(name, float32(x));
  }
}

TEST(NewtonSchulzCuda, EveryPlanAgreesWithTheOracleOnEveryShapeClass) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {1024, 256}, {640, 640}, {599, 1201}, {1031, 401}, {3, 256, 700}}) {
    expect_every_plan_agrees("random", float32(random_matrix(sizes)));
  }
}

class ByLibrary : public testing::Test {
 protected:
  ByLibrary() { load_device_newton_schulz(DMUON_CUDA_LIBRARY); }
  ~ByLibrary() override { register_device_newton_schulz(c10::DeviceType::CUDA, {}); }
};

TEST_F(ByLibrary, NewtonSchulzTakesCudaTensorsOfAnyShape) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {1, 1}, {1, 700}, {700, 1}, {3, 5}, {127, 31}, {5, 64, 64}, {2, 2048, 2304}}) {
    const at::Tensor x = float32(random_matrix(sizes));
    const at::Tensor result = newton_schulz(on_gpu(x), {});
    EXPECT_EQ(result.sizes(), x.sizes());
    EXPECT_LT(error_of(result, x), 20 * 0x1p-11) << x.sizes();
  }
  EXPECT_EQ(newton_schulz(on_gpu(random_matrix({0, 4})), {}).numel(), 0);
}

TEST_F(ByLibrary, NamesWhatRuns) {
  EXPECT_EQ(newton_schulz_kernel_on(c10::DeviceType::CUDA, 1, 256, 1024, {}),
            "gram/cublaslt/float16");
  EXPECT_EQ(
      newton_schulz_kernel_on(c10::DeviceType::CUDA, 1, 256, 256, {.dtype = NsDtype::float32}),
      "direct/cublaslt/float32");
}

TEST_F(ByLibrary, TakesEveryDtypeAndAnyStrides) {
  const at::Tensor x = float32(random_matrix({96, 320}).to(at::kBFloat16));
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    EXPECT_LT(error_of(newton_schulz(on_gpu(x, dtype), {}), x), 20 * 0x1p-11);
  }
  const at::Tensor half = float32(x.to(at::kHalf));
  EXPECT_LT(error_of(newton_schulz(on_gpu(half, at::kHalf), {}), half), 20 * 0x1p-11);
  EXPECT_LT(error_of(newton_schulz(on_gpu(x).t(), {}), x.t()), 20 * 0x1p-11);
  EXPECT_LT(error_of(newton_schulz(on_gpu(x, at::kDouble), {}), x), kTolerance);
}

TEST_F(ByLibrary, FollowsEachCoefficientSet) {
  const at::Tensor x = float32(random_matrix({128, 512}));
  for (const CoefficientSet* set : {&you_coefficients(), &jordan_coefficients()}) {
    for (int steps : {1, 2, 5, 10}) {
      NewtonSchulz options;
      options.coefficients = *set;
      options.steps = steps;
      options.restarts = std::vector<int>();
      EXPECT_LT(error_of(newton_schulz(on_gpu(x), options), x, options), 20 * 0x1p-11)
          << set->name << ", " << steps << " steps";
    }
  }
}

TEST_F(ByLibrary, ScaleDoesNotMatterAndZerosStayZero) {
  const at::Tensor x = float32(random_matrix({200, 300}));
  const at::Tensor batch = at::stack({x, x * 0x1p-100, x * 0x1p120, x * 0, x * 0x1p-140});
  const at::Tensor out = newton_schulz(on_gpu(batch), {}).cpu();
  EXPECT_TRUE(at::equal(out[0], out[1]));
  EXPECT_TRUE(at::equal(out[0], out[2]));
  EXPECT_TRUE(at::equal(out[3], at::zeros_like(x)));
  EXPECT_LT(error_of(out[4], batch[4]), 20 * 0x1p-11);
}

TEST_F(ByLibrary, OneNaNTakesItsWholeMatrixAndNoOther) {
  at::Tensor x = float32(random_matrix({3, 150, 70}));
  const at::Tensor clean = newton_schulz(on_gpu(x), {}).cpu();
  x[1][149][69].fill_(std::numeric_limits<float>::quiet_NaN());
  x[2][0][0].fill_(std::numeric_limits<float>::infinity());
  const at::Tensor out = newton_schulz(on_gpu(x), {}).cpu();
  EXPECT_TRUE(at::equal(out[0], clean[0]));
  EXPECT_TRUE(at::isnan(out[1]).all().item<bool>());
  EXPECT_TRUE(at::isnan(out[2]).all().item<bool>());
}

TEST_F(ByLibrary, GivesTheSameBitsAgainAndOnAnotherStream) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2048, 8192}, {4, 512, 1024}}) {
    const at::Tensor x = on_gpu(random_matrix(sizes));
    const at::Tensor first = newton_schulz(x, {});
    EXPECT_TRUE(at::equal(newton_schulz(x, {}), first));
    c10::cuda::device_synchronize();
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    EXPECT_TRUE(at::equal(newton_schulz(x, {}), first));
  }
}

// 2048 x 8192 has blocks and therefore pointers.
TEST_F(ByLibrary, AGraphReplaysWhatAnEagerCallDoes) {
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{2048, 8192}, {4, 512, 1024}, {97, 331}}) {
    const at::Tensor x = on_gpu(random_matrix(sizes, 1));
    newton_schulz(x, {});
    at::cuda::CUDAGraph graph;
    at::Tensor out;
    capture(graph, [&] { out = newton_schulz(x, {}); });
    for (uint64_t seed : {2, 3}) {
      x.copy_(random_matrix(sizes, seed));
      graph.replay();
      c10::cuda::device_synchronize();
      EXPECT_TRUE(at::equal(out, newton_schulz(x, {}))) << x.sizes() << ", seed " << seed;
    }
  }
}

}  // namespace
}  // namespace dmuon

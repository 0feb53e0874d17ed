#include "tests/cuda/timings.h"

#include <ATen/TensorOperators.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <limits>
#include <optional>

#include "kernels/cuda/newton_schulz_cuda.h"
#include "kernels/cuda/problem.h"
#include "tests/cuda/graph.h"

namespace dmuon {
namespace {

using cuda::Executor;
using cuda::Machine;
using cuda::Plan;
using cuda::Problem;

double elapsed_ms(const std::function<void()>& enqueue) {
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  begin.record();
  enqueue();
  end.record();
  end.synchronize();
  return begin.elapsed_time(end);
}

double fastest_ms(const std::function<void()>& enqueue) {
  constexpr int kRepeats = 7;
  enqueue();
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRepeats; ++i) best = std::min(best, elapsed_ms(enqueue));
  return best;
}

double fastest_replay_ms(const std::function<void()>& enqueue) {
  enqueue();
  at::cuda::CUDAGraph graph;
  capture(graph, enqueue);
  return fastest_ms([&] { graph.replay(); });
}

// As torch.optim.Muon, from the normalised matrix on, in float16.
void torch_direct(at::Tensor x, const NewtonSchulz& options) {
  for (int step = 0; step < options.steps; ++step) {
    const auto& [a, b, c] = options.coefficients.row(step);
    const at::Tensor gram = at::bmm(x, x.mT());
    const at::Tensor z = at::baddbmm(gram, gram, gram, b, c);
    x = at::baddbmm(x, z, x, a, 1);
  }
}

double torch_ms(const at::Tensor& x) {
  const at::Tensor wide = x.size(1) > x.size(2) ? x.mT().contiguous() : x;
  const at::Tensor half = (wide / wide.norm()).to(at::kHalf);
  return fastest_replay_ms([&] { torch_direct(half, {}); });
}

void print_plan(const at::Tensor& x, const Plan& plan, const Machine& machine, bool chosen,
                double baseline_ms) {
  const auto executor = Executor::make(plan, at::cuda::getCurrentCUDABlasLtHandle(), machine);
  std::printf("  %-6s %d blocks  ", plan.gram ? "gram" : "direct", plan.blocks);
  if (!executor) {
    std::puts("no algorithm in cuBLASLt");
    return;
  }
  const double ms = fastest_replay_ms([&] { cuda::run(*executor, x); });
  std::printf("%9.3f ms  %5.2fx torch  estimate %9.3f ms", ms, baseline_ms / ms,
              estimated_ns(plan, machine) * 1e-6);
  if (chosen) {
    std::printf("  <- chosen; eager %.3f ms", fastest_ms([&] { cuda::run(*executor, x); }));
  }
  std::puts("");
}

void print_shape(const std::array<int64_t, 3>& sizes) {
  const at::Tensor x = at::randn(sizes, at::TensorOptions().device(at::kCUDA).dtype(at::kFloat));
  const double baseline_ms = torch_ms(x);
  std::printf("%ld x %ld x %ld: torch direct float16 %.3f ms\n", sizes[0], sizes[1], sizes[2],
              baseline_ms);
  const Machine machine = cuda::current_machine();
  const Problem problem = cuda::problem_of(x, {});
  const Plan best = make_plan(problem, machine);
  for (bool gram : {false, true}) {
    for (int blocks : {1, 4, 5, 6, 7, 8}) {
      const bool chosen = gram == best.gram && blocks == best.blocks;
      const bool likely = blocks == 1 || std::min(sizes[1], sizes[2]) >= 1024;
      if (!chosen && !likely) continue;
      print_plan(x, plan_with(problem, machine, gram, blocks), machine, chosen, baseline_ms);
    }
  }
}

}  // namespace

void print_timings() {
  for (const auto& sizes : std::vector<std::array<int64_t, 3>>{{1, 1024, 4096},
                                                               {16, 1024, 4096},
                                                               {64, 256, 1024},
                                                               {1, 2048, 2048},
                                                               {1, 4096, 4096},
                                                               {1, 4096, 14336},
                                                               {1, 14336, 4096},
                                                               {1, 8192, 28672}}) {
    print_shape(sizes);
  }
}

}  // namespace dmuon

// Prints, per shape and kernel, the thread-CPU milliseconds of one Newton-Schulz, its rate, and the
// ratio to the direct iteration in float32; then the error of each kernel on spectra from kind to
// cruel against the float64 reference. OMP_NUM_THREADS=1 for figures that compare.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/newton_schulz.h"

namespace dmuon {
namespace {

struct Kernel {
  const char* name;
  NewtonSchulz options;
};

std::vector<Kernel> kernels() {
  NewtonSchulz gram, free_running, direct, low, low_direct;
  free_running.restarts = {};
  direct.algorithm = low_direct.algorithm = NsAlgorithm::direct;
  low.dtype = low_direct.dtype = NsDtype::bfloat16;
  return {{"direct", direct},
          {"gram r[2]", gram},
          {"gram r[]", free_running},
          {"direct bf16", low_direct},
          {"gram bf16 r[2]", low}};
}

double thread_ms() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

double fastest_ms(const std::function<void()>& run, int repeats) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repeats; ++i) {
    const double begin = thread_ms();
    run();
    best = std::min(best, thread_ms() - begin);
  }
  return best;
}

void print_times(int64_t rows, int64_t cols) {
  const at::Tensor x = at::randn({rows, cols});
  double direct_ms = 0;
  for (const auto& [name, options] : kernels()) {
    const double ms = fastest_ms([&] { newton_schulz(x, options); }, 15);
    if (direct_ms == 0) direct_ms = ms;
    std::printf("%5ld x %-5ld %-15s %-18s %8.2f ms  %5.2f of direct\n", rows, cols, name,
                newton_schulz_kernel(1, rows, cols, options).c_str(), ms, ms / direct_ms);
  }
}

at::Tensor orthonormal(int64_t rows, int64_t cols) {
  return std::get<0>(at::linalg_qr(at::randn({rows, cols}, at::kDouble)));
}

at::Tensor with_spectrum(const at::Tensor& sigma, int64_t rows, int64_t cols) {
  const int64_t k = sigma.size(0);
  return (orthonormal(rows, k) * sigma).matmul(orthonormal(cols, k).t());
}

at::Tensor falling(int64_t n, double decades) {
  return (at::arange(n, at::kDouble) * (-decades * std::log(10.0) / (n - 1))).exp();
}

void print_errors(int64_t rows, int64_t cols) {
  const int64_t n = std::min(rows, cols);
  const at::Tensor spike =
      at::cat({at::ones({1}, at::kDouble), at::full({n - 1}, 1e-4, at::kDouble)});
  const std::vector<std::pair<const char*, at::Tensor>> inputs = {
      {"gaussian", at::randn({rows, cols}, at::kDouble)},
      {"1/i", with_spectrum((at::arange(n, at::kDouble) + 1).reciprocal(), rows, cols)},
      {"cond 1e3", with_spectrum(falling(n, 3), rows, cols)},
      {"cond 1e6", with_spectrum(falling(n, 6), rows, cols)},
      {"rank 32", with_spectrum(at::ones({32}, at::kDouble), rows, cols)},
      {"one big", with_spectrum(spike, rows, cols)}};
  for (const auto& [spectrum, x64] : inputs) {
    const at::Tensor x = x64.to(at::kFloat);
    const at::Tensor exact = newton_schulz_reference(x.to(at::kDouble), {});
    std::printf("%4ld x %-5ld %-9s", rows, cols, spectrum);
    for (const auto& [name, options] : kernels()) {
      const at::Tensor got = newton_schulz(x, options).to(at::kDouble);
      std::printf("  %s %.1e", name,
                  (got - exact).norm().item<double>() / exact.norm().item<double>());
    }
    std::printf("\n");
  }
}

}  // namespace
}  // namespace dmuon

int main() {
  for (auto [rows, cols] : {std::pair{256, 256}, {768, 256}, {1024, 256}, {256, 1024}}) {
    dmuon::print_times(rows, cols);
  }
  dmuon::print_errors(512, 512);
  dmuon::print_errors(256, 1024);
}

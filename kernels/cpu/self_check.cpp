#include "kernels/cpu/self_check.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <utility>

#include "kernels/cpu/orthogonalise.h"

namespace dmuon::cpu {
namespace {

struct Sizes {
  int64_t rows, cols;
};

// Neither is a multiple of any tile.
constexpr Sizes kProbes[] = {{7, 23}, {101, 333}, {277, 601}};

int size_class(int64_t rows, int64_t cols) {
  const int64_t shorter = std::min(rows, cols);
  return shorter <= kWidest ? 0 : shorter <= 256 ? 1 : 2;
}

using Class = size_t;
constexpr size_t kSizeClasses = std::size(kProbes);
constexpr size_t kClasses = kIsas * 8 * kSizeClasses;

Class class_of(const Recipe& recipe, int64_t rows, int64_t cols) {
  Class key = static_cast<size_t>(recipe.isa);
  for (const bool bit : {recipe.form == NsAlgorithm::gram, recipe.bfloat16, rows > cols}) {
    key = 2 * key + bit;
  }
  return kSizeClasses * key + size_class(rows, cols);
}

enum class Verdict : uint8_t { none, good, bad };

// No lock, which a process that forks could leave held in its child.
std::atomic<Verdict>& verdict(const Class& key) {
  static std::array<std::atomic<Verdict>, kClasses> verdicts{};
  return verdicts.at(key);
}

// Not torch's generator: its state is the user's.
at::Tensor fixed_matrix(int64_t rows, int64_t cols) {
  at::Tensor x = at::empty({rows, cols}, at::kFloat);
  float* data = x.mutable_data_ptr<float>();
  uint32_t state = 1;
  for (int64_t i = 0; i < x.numel(); ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = static_cast<float>(state >> 8) * 0x1p-23f - 1;
  }
  return x;
}

View view_of(const at::Tensor& x) {
  const int64_t rows = x.size(0), cols = x.size(1);
  const View wide = {x.data_ptr(), x.scalar_type(), rows, cols, cols, 1};
  return rows <= cols ? wide : wide.transposed();
}

Sizes probe_for(int64_t rows, int64_t cols) {
  Sizes probe = kProbes[size_class(rows, cols)];
  if (rows > cols) std::swap(probe.rows, probe.cols);
  return probe;
}

// A random matrix errs by 1e-5 in float32 and by 2e-2 in bfloat16.
double allowed_error(const Recipe& recipe) { return recipe.bfloat16 ? 0.1 : 1e-3; }

double measured_error(const Recipe& recipe, const Sizes& probe) {
  Recipe usual = recipe;
  usual.steps = 5;
  usual.coefficients = polar_express_coefficients();
  usual.bounds = recipe.bfloat16 ? std::vector{0, 2, 5} : std::vector{0, 5};
  return error_of(tile_kernels(recipe.isa), usual, probe.rows, probe.cols);
}

void warn(const Recipe& recipe, const Sizes& probe, double error) {
  TORCH_WARN("dmuon: the Newton-Schulz kernel ", recipe_name(recipe), " errs by ", error, " on ",
             probe.rows, " x ", probe.cols, " on this machine, where ", allowed_error(recipe),
             " is allowed. torch's matrix products run in its place. Please report this; "
             "DMUON_ISA chooses other instructions.");
}

}  // namespace

double error_of(const TileKernels& kernels, const Recipe& recipe, int64_t rows, int64_t cols) {
  const at::Tensor x = fixed_matrix(rows, cols), got = at::empty_like(x);
  const at::Tensor wide = x.to(at::kDouble);
  NewtonSchulz options;
  options.steps = recipe.steps;
  options.coefficients = recipe.coefficients;
  const at::Tensor want = newton_schulz_reference(wide, options);
  NsWorkspace workspace;
  std::vector<Arena>& arenas = workspace.arenas(1);
  arenas[0].reserve(demand(kernels, recipe, view_of(x), view_of(got)).first);
  orthogonalise(kernels, recipe, view_of(x), view_of(got),
                static_cast<float>(1 / wide.norm().item<double>()), {arenas});
  return ((got.to(at::kDouble) - want).norm() / want.norm()).item<double>();
}

bool trusted(const Recipe& recipe, int64_t rows, int64_t cols) {
  std::atomic<Verdict>& known = verdict(class_of(recipe, rows, cols));
  if (known.load() != Verdict::none) return known.load() == Verdict::good;
  const Sizes probe = probe_for(rows, cols);
  const double error = measured_error(recipe, probe);
  const bool good = error < allowed_error(recipe);
  Verdict none = Verdict::none;
  const bool first = known.compare_exchange_strong(none, good ? Verdict::good : Verdict::bad);
  if (first && !good) warn(recipe, probe, error);
  return good;
}

void set_verdict(const Recipe& recipe, int64_t rows, int64_t cols, bool trusted) {
  verdict(class_of(recipe, rows, cols)) = trusted ? Verdict::good : Verdict::bad;
}

bool not_distrusted(const Recipe& recipe, int64_t rows, int64_t cols) {
  return verdict(class_of(recipe, rows, cols)).load() != Verdict::bad;
}

}  // namespace dmuon::cpu

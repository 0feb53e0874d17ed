#include "kernels/checks.h"

#include <ATen/TracerMode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/error.h"
#include "kernels/newton_schulz.h"

namespace dmuon {
namespace {

// Bytes from the start of the storage to the end of the last element.
int64_t reach(const at::Tensor& x) {
  int64_t last = x.storage_offset();
  for (int64_t dim = 0; dim < x.dim(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
  return (last + 1) * x.element_size();
}

// Kernels read by address, which such tensors do not give.
bool stands_for_others(const at::Tensor& x) {
  return x.layout() != at::kStrided || x.is_nested() || !x.has_storage() || x._is_zerotensor() ||
         x.key_set().has_any(
             c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
}

bool memory_is_there(const at::Tensor& x) {
  if (x.numel() == 0 || x.is_meta()) return true;
  const c10::Storage& storage = x.storage();
  return storage.data() != nullptr && static_cast<int64_t>(storage.nbytes()) >= reach(x);
}

void require_memory(const at::Tensor& x, const char* name) {
  if (!x.defined()) {
    throw ConfigError(message("Newton-Schulz got ", name, " that is undefined."));
  }
  if (stands_for_others(x)) {
    throw ConfigError(message("Newton-Schulz got ", name,
                              " without strided memory of its own: sparse, nested, a DTensor or "
                              "another subclass that stands for other tensors. Give it the plain "
                              "tensor: full_tensor() of a DTensor, to_dense() of a sparse one."));
  }
  if (memory_is_there(x)) return;
  throw ConfigError(message("Newton-Schulz got ", name, " of sizes ", x.sizes(),
                            " whose storage holds less than its elements. It has been freed or "
                            "resized, as FSDP frees a parameter's; use it while it is gathered."));
}

double after(const CoefficientRow& row, double sigma) {
  const auto& [a, b, c] = row;
  const double square = sigma * sigma;
  return sigma * (a + square * (b + square * c));
}

// Far beyond any set that converges, and what float32 squares twice with room to spare.
constexpr double kHighestOnTheWay = 1000;

// NaN where it leaves that range on the way.
double mapped(double sigma, const CoefficientSet& set, int steps) {
  for (int step = 0; step < steps; ++step) {
    sigma = after(set.row(step), sigma);
    if (!(std::abs(sigma) <= kHighestOnTheWay)) return std::nan("");
  }
  return sigma;
}

// A thousand evenly spaced, and twenty to each decade below the least of them.
std::vector<double> watched_sigmas() {
  constexpr double kLargest = 1.005;
  constexpr int kPoints = 1000, kDecades = 12, kPerDecade = 20;
  std::vector<double> sigmas;
  for (int i = 1; i <= kPoints; ++i) sigmas.push_back(kLargest * i / kPoints);
  for (int i = 1; i <= kDecades * kPerDecade; ++i) {
    sigmas.push_back(kLargest / kPoints * std::pow(10, -static_cast<double>(i) / kPerDecade));
  }
  return sigmas;
}

struct Checked {
  std::vector<CoefficientRow> rows;
  PastEnd past_end = PastEnd::repeat_last;
  int steps = 0;
};

}  // namespace

void require_matrices(const at::Tensor& x, const char* name) {
  require_memory(x, name);
  if (x.dim() != 2 && x.dim() != 3) {
    throw ConfigError(message("Newton-Schulz got ", name, " of ", x.dim(), " dims, sizes ",
                              x.sizes(),
                              "; it takes [m, n] or [b, m, n]. Choose a view for this weight."));
  }
  const at::ScalarType dtype = x.scalar_type();
  if (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble) {
    return;
  }
  throw ConfigError(message("Newton-Schulz got ", name, " of dtype ", dtype,
                            "; it takes float64, float32, bfloat16 or float16. Convert it first."));
}

void require_not_traced() {
  using Mode = c10::impl::TorchDispatchModeKey;
  const auto on = [](Mode mode) { return c10::impl::TorchDispatchModeTLS::get_mode(mode); };
  if (!at::tracer::impl::is_dispatch_enabled() && !on(Mode::PROXY) && !on(Mode::FAKE)) return;
  throw ConfigError(
      "Newton-Schulz cannot be traced (torch.jit.trace, make_fx, torch.export, FakeTensorMode): "
      "its "
      "kernels are none of torch's operations. Call it outside of what is traced; torch.compile "
      "without fullgraph=True does so by itself.");
}

void require_tame(const CoefficientSet& set, int steps) {
  static thread_local Checked last;
  if (last.steps == steps && last.rows == set.rows && last.past_end == set.past_end) return;
  const int all = std::max(steps, static_cast<int>(set.rows.size()));
  for (const double sigma : watched_sigmas()) {
    const double image = mapped(sigma, set, all);
    if (image >= 0 && image <= 1.5) continue;
    throw ConfigError(message("The coefficient set '", set.name, "' maps a singular value of ",
                              sigma, " to ", image, " in ", all,
                              " steps; it must stay within [0, 1.5] up to 1.005, and below 1000 on "
                              "the way. Divide each row (a, b, c) by (s, s^3, s^5) with s = 1.05, "
                              "or use another set."));
  }
  last = {set.rows, set.past_end, steps};
}

}  // namespace dmuon

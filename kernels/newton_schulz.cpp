#include "kernels/newton_schulz.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "kernels/checks.h"
#include "kernels/cpu/list.h"
#include "kernels/device_newton_schulz.h"
#include "kernels/error.h"
#include "kernels/newton_schulz_mm.h"

namespace dmuon {
namespace {

void require_restart_inside(int restart, int steps) {
  if (restart >= 1 && restart < steps) return;
  throw ConfigError(message("Newton-Schulz has a restart before step ", restart, " of ", steps,
                            "; restarts lie in [1, steps). Drop it, or take more steps."));
}

void require_fits(const NsJob& job) {
  require_matrices(job.in);
  require_matrices(job.out, "an out");
  const at::ScalarType dtype = job.out.scalar_type();
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (known && job.out.is_contiguous() && !job.out.is_neg() && job.out.sizes() == job.in.sizes() &&
      job.out.device() == job.in.device()) {
    return;
  }
  throw ConfigError(message("Newton-Schulz got an out of sizes ", job.out.sizes(), ", dtype ",
                            dtype, " on ", job.out.device(), " for an in of sizes ", job.in.sizes(),
                            " on ", job.in.device(),
                            "; it takes a contiguous float32, bfloat16 or "
                            "float16 tensor of the same sizes there."));
}

}  // namespace

void NewtonSchulz::validate() const {
  if (steps < 1 || steps > kMostSteps) {
    throw ConfigError(message("Newton-Schulz has steps = ", steps, "; it takes 1 to ", kMostSteps,
                              ". Five is usual."));
  }
  const size_t rows = coefficients.rows.size();
  if (rows < 1 || rows > kMostSteps) {
    throw ConfigError(message("The coefficient set '", coefficients.name, "' has ", rows,
                              " rows; give one (a, b, c) for each step, 1 to ", kMostSteps, "."));
  }
  require_tame(coefficients, steps);
  if (algorithm != NsAlgorithm::gram || !restarts) return;
  for (int restart : *restarts) require_restart_inside(restart, steps);
}

at::Tensor newton_schulz(const at::Tensor& x, const NewtonSchulz& options) {
  options.validate();
  require_not_traced();
  require_matrices(x);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  const at::Tensor in = x.resolve_neg();
  const at::Tensor there = in.numel() != 0 ? newton_schulz_on_device(in, options) : at::Tensor();
  if (there.defined()) return there;
  const at::Tensor out = at::empty(in.sizes(), in.options().dtype(at::kFloat));
  NsWorkspace workspace;
  newton_schulz({{in, out}}, options, workspace);
  return out;
}

void newton_schulz(const std::vector<NsJob>& jobs, const NewtonSchulz& options,
                   NsWorkspace& workspace) {
  options.validate();
  const at::NoGradGuard no_grad;
  std::vector<NsJob> on_cpu;
  for (const NsJob& job : jobs) require_fits(job);
  for (const NsJob& job : jobs) {
    if (job.in.numel() == 0) continue;
    const at::Tensor in = job.in.resolve_neg();
    const at::Tensor there = newton_schulz_on_device(in, options);
    if (there.defined()) {
      job.out.copy_(there);
    } else if (in.is_cpu()) {
      on_cpu.push_back({in, job.out});
    } else {
      job.out.copy_(newton_schulz_mm(in, options));
    }
  }
  cpu::newton_schulz_list(on_cpu, options, workspace);
}

std::string newton_schulz_kernel(int64_t batch, int64_t rows, int64_t cols,
                                 const NewtonSchulz& options) {
  if (batch < 0 || rows < 0 || cols < 0) {
    throw ConfigError(message("Newton-Schulz got a shape of ", batch, " x ", rows, " x ", cols,
                              "; batch, rows and cols are at least 0."));
  }
  if (batch == 0 || rows == 0 || cols == 0) return "none";
  return cpu::newton_schulz_name(batch, rows, cols, options);
}

}  // namespace dmuon

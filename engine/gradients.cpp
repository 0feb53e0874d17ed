#include "engine/gradients.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "engine/agreement.h"
#include "engine/digest.h"
#include "engine/error.h"
#include "kernels/sum_pieces.h"

namespace dmuon {
namespace {

// NaN wins over everything, so that a norm over it is NaN.
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

double local_power_sum(Engine& engine, const GradientSet& set, double p) {
  double total = 0;
  const auto add = [&](const at::Tensor& gradient) {
    if (!gradient.defined()) return;
    const double value = sum_of_powers(gradient, p);
    total = std::isinf(p) ? larger(total, value) : total + value;
  };
  for (const int matrix : set.matrices) {
    const Slot& slot = engine.slot(matrix);
    if (slot.layout.cut() || slot.leads) add(owned_gradient(engine, matrix));
  }
  for (const auto& gradient : set.counted) add(gradient);
  return total;
}

// What has been gathered is scaled alike: the same bits as gathering again.
void scale_owned(Slot& slot, double factor) {
  at::Tensor gradient = slot.owned ? slot.gradient() : at::Tensor();
  if (!gradient.defined()) return;
  const bool together = slot.gathers && slot.gathered_is_current();
  gradient.mul_(factor);
  if (!together) return;
  if (slot.gathered.defined()) slot.gathered.mul_(factor);
  slot.note_gathered();
}

std::string fault_of_norm(double p) {
  if (p >= 0) return "";
  return message("norm_type is ", p, "; it must be at least 0, inf for the largest magnitude.");
}

std::string fault_of_clipping(double max_norm, double p) {
  if (max_norm >= 0) return fault_of_norm(p);
  return message("max_norm is ", max_norm, "; it must be at least 0, inf to measure alone.");
}

int64_t clipping_hash(double max_norm, double p) {
  return static_cast<int64_t>(Hasher().add(max_norm).add(p).digest().words[0]);
}

// `fault`: why this rank cannot. It takes part all the same, so that none waits for it.
double norm_or_raise(Engine& engine, const GradientSet& set, double p, const std::string& fault) {
  engine.wait_reductions();
  at::Tensor total = at::zeros({3}, at::kDouble);
  auto* data = total.data_ptr<double>();
  data[2] = fault.empty() ? 0 : 1;
  if (fault.empty()) data[0] = local_power_sum(engine, set, p);
  if (std::isnan(data[0])) data[0] = 0, data[1] = 1;  // a maximum would lose it
  const auto agreeing = engine.clock().in(Phase::agreement);
  engine.control().all_reduce(total, std::isinf(p) ? ReduceOp::max : ReduceOp::sum, "(norm)");
  if (data[2] > 0) agree(engine.control(), {.error = fault});
  if (data[1] > 0) return std::nan("");
  return std::isinf(p) || p == 0 ? data[0] : std::pow(data[0], 1 / p);
}

}  // namespace

at::Tensor owned_gradient(Engine& engine, int matrix) {
  const Slot& slot = engine.slot(matrix);
  return slot.owned ? slot.gradient() : at::Tensor();
}

at::Tensor whole_gradient(Engine& engine, int matrix) {
  const Slot& slot = engine.slot(matrix);
  if (!slot.leads) return {};
  return slot.gathers ? slot.gathered : slot.gradient();
}

double gradient_norm(Engine& engine, const GradientSet& set, double p) {
  return norm_or_raise(engine, set, p, fault_of_norm(p));
}

double clip_gradients(Engine& engine, const GradientSet& set, double max_norm, double p,
                      bool error_if_nonfinite) {
  engine.note_clipping(clipping_hash(max_norm, p));
  const double norm = norm_or_raise(engine, set, p, fault_of_clipping(max_norm, p));
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw RuntimeFailure(
        message("the total norm of order ", p, " of the gradients is ", norm,
                ", so it cannot be clipped. To clip anyway, pass error_if_nonfinite=False."));
  }
  if (std::isinf(max_norm)) return norm;
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) scale_gradients(engine, set, factor);
  return norm;
}

void scale_gradients(Engine& engine, const GradientSet& set, double factor) {
  c10::NoGradGuard no_grad;
  for (const int matrix : set.matrices) scale_owned(engine.slot(matrix), factor);
  for (const auto* part : {&set.counted, &set.copies}) {
    for (at::Tensor gradient : *part) gradient.mul_(factor);
  }
}

}  // namespace dmuon

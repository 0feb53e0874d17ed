#include "kernels/momentum.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "kernels/flat.h"

namespace dmuon {
namespace {

template <bool kNesterov, class Grad>
void momentum_loop(float* buf, const Grad* grad, float momentum, float* u, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = static_cast<float>(grad[i]);
    const float moved = momentum * buf[i] + g;
    buf[i] = moved;
    u[i] = kNesterov ? g + momentum * moved : moved;
  }
}

template <class Grad>
void momentum_cpu(at::Tensor& buf, const at::Tensor& grad, float momentum, bool nesterov,
                  at::Tensor& u) {
  float* b = buf.mutable_data_ptr<float>();
  const Grad* g = grad.const_data_ptr<Grad>();
  float* out = u.mutable_data_ptr<float>();
  const auto loop = nesterov ? momentum_loop<true, Grad> : momentum_loop<false, Grad>;
  at::parallel_for(0, buf.numel(), kGrain, [&](int64_t begin, int64_t end) {
    loop(b + begin, g + begin, momentum, out + begin, end - begin);
  });
}

void momentum_by_tensors(at::Tensor& buf, const at::Tensor& grad, double momentum, bool nesterov,
                         at::Tensor& u) {
  buf.mul_(momentum).add_(grad);
  if (nesterov) {
    u.copy_(grad).add_(buf, momentum);
  } else {
    u.copy_(buf);
  }
}

void apply_loop(float* weight, const float* o, float keep, float rate, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] = keep * weight[i] - rate * o[i];
}

}  // namespace

void momentum_update(at::Tensor& buf, const at::Tensor& grad, double momentum, bool nesterov,
                     at::Tensor& u) {
  const at::NoGradGuard no_grad;
  const bool flat = is_flat(buf, at::kFloat) && is_flat(u, at::kFloat) &&
                    buf.sizes() == grad.sizes() && buf.sizes() == u.sizes();
  if (flat && is_flat(grad, at::kFloat)) {
    momentum_cpu<float>(buf, grad, static_cast<float>(momentum), nesterov, u);
  } else if (flat && is_flat(grad, at::kBFloat16)) {
    momentum_cpu<c10::BFloat16>(buf, grad, static_cast<float>(momentum), nesterov, u);
  } else {
    momentum_by_tensors(buf, grad, momentum, nesterov, u);
  }
}

void apply_update(at::Tensor& weight, const at::Tensor& o, double lr, double weight_decay,
                  double scale) {
  const at::NoGradGuard no_grad;
  const double keep = 1 - lr * weight_decay, rate = lr * scale;
  if (!is_flat(weight, at::kFloat) || !is_flat(o, at::kFloat) || weight.sizes() != o.sizes()) {
    weight.mul_(keep).add_(o, -rate);
    return;
  }
  float* w = weight.mutable_data_ptr<float>();
  const float* update = o.const_data_ptr<float>();
  at::parallel_for(0, weight.numel(), kGrain, [&](int64_t begin, int64_t end) {
    apply_loop(w + begin, update + begin, static_cast<float>(keep), static_cast<float>(rate),
               end - begin);
  });
}

double adjusted_scale(AdjustLr rule, int64_t rows, int64_t cols) {
  const double aspect = static_cast<double>(rows) / static_cast<double>(cols);
  switch (rule) {
    case AdjustLr::match_rms_adamw:
      return 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
    case AdjustLr::original:
      return std::sqrt(std::max(1.0, aspect));
    case AdjustLr::spectral_unclamped:
      return std::sqrt(aspect);
  }
  return 1;
}

}  // namespace dmuon

// AdamW for a weight that lies whole on one rank.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

struct AdamwSettings {
  double lr, weight_decay, beta1, beta2, eps;
  double step;  // 1 at the first update
};

// torch.optim.AdamW's update, in place, with decoupled decay:
//   w *= 1 - lr decay;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g g
//   w -= lr / (1 - beta1^step)  m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// All float32 but the gradient, which may have any floating dtype.
void adamw_update(at::Tensor& weight, const at::Tensor& gradient, at::Tensor& exp_avg,
                  at::Tensor& exp_avg_sq, const AdamwSettings& settings);

}  // namespace dmuon

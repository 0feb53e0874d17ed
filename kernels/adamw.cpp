#include "kernels/adamw.h"

#include <cmath>

namespace dmuon {

void adamw_update(at::Tensor& weight, const at::Tensor& gradient, at::Tensor& exp_avg,
                  at::Tensor& exp_avg_sq, const AdamwSettings& s) {
  const at::Tensor g = gradient.to(exp_avg.scalar_type());
  weight.mul_(1 - s.lr * s.weight_decay);
  exp_avg.lerp_(g, 1 - s.beta1);
  exp_avg_sq.mul_(s.beta2).addcmul_(g, g, 1 - s.beta2);
  const double correction1 = 1 - std::pow(s.beta1, s.step);
  const double correction2 = std::sqrt(1 - std::pow(s.beta2, s.step));
  const at::Tensor denominator = exp_avg_sq.sqrt().div_(correction2).add_(s.eps);
  weight.addcdiv_(exp_avg, denominator, -s.lr / correction1);
}

}  // namespace dmuon

// The elementwise part of Muon, before and after Newton-Schulz: one pass over memory each where all
// tensors are contiguous float32 on the CPU (the gradient bfloat16 if you like), tensor operations
// of the same formula elsewhere. Nothing here is recorded by autograd.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

enum class AdjustLr { match_rms_adamw, original, spectral_unclamped };

// buf = momentum buf + grad; u = grad + momentum buf (nesterov), else buf. buf is float32; u has
// its shape, is overwritten, and may be grad itself.
void momentum_update(at::Tensor& buf, const at::Tensor& grad, double momentum, bool nesterov,
                     at::Tensor& u);

// weight = weight (1 - lr weight_decay) - lr scale o
void apply_update(at::Tensor& weight, const at::Tensor& o, double lr, double weight_decay,
                  double scale);

// The factor on lr that makes updates of all shapes alike, as torch.optim.Muon's adjust_lr_fn:
// 0.2 sqrt(max(rows, cols)) | sqrt(max(1, rows / cols)) | sqrt(rows / cols).
double adjusted_scale(AdjustLr rule, int64_t rows, int64_t cols);

}  // namespace dmuon

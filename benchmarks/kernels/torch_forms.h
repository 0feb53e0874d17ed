// What to be compared with: Newton-Schulz as one writes it with torch's own operations.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon::bench {

// The direct iteration in x's dtype, as in torch.optim.Muon; [m, n] or [b, m, n].
at::Tensor torch_direct(const at::Tensor& x);

// The Gram iteration without a restart, in x's dtype.
at::Tensor torch_gram(const at::Tensor& x);

}  // namespace dmuon::bench

// Newton-Schulz by torch's own matrix products: on any device, and on a CPU whose own kernels have
// failed their check.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "kernels/newton_schulz.h"

namespace dmuon {

// As newton_schulz, of an x that has been checked and is not empty. Restarts left open are one,
// before the third step.
at::Tensor newton_schulz_mm(const at::Tensor& x, const NewtonSchulz& options);

// "gram/mm/float32", for a batch "gram/bmm/float32"
std::string newton_schulz_mm_name(int64_t batch, int64_t rows, int64_t cols,
                                  const NewtonSchulz& options);

}  // namespace dmuon

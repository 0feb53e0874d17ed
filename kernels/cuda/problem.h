// What a plan is made for, from what newton_schulz is asked for. No CUDA here.
#pragma once
#include <c10/core/ScalarType.h>

#include "kernels/cuda/plan.h"
#include "kernels/newton_schulz.h"

namespace dmuon::cuda {

inline Element element_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return Element::float16;
  return dtype == at::kBFloat16 ? Element::bfloat16 : Element::float32;
}

// NsDtype::automatic is float16.
inline Element precision_of(NsDtype dtype) {
  if (dtype == NsDtype::float32) return Element::float32;
  return dtype == NsDtype::bfloat16 ? Element::bfloat16 : Element::float16;
}

// Left open: before the third step, without which a float16 chain diverges.
inline std::vector<int> restarts_of(const NewtonSchulz& options) {
  const std::vector<int> open = options.steps > 2 ? std::vector{2} : std::vector<int>();
  return options.restarts.value_or(open);
}

inline Problem problem_of(int64_t batch, int64_t rows, int64_t cols, const NewtonSchulz& options,
                          Element input = Element::float32) {
  Problem problem{.batch = batch,
                  .rows = rows,
                  .cols = cols,
                  .restarts = restarts_of(options),
                  .gram = options.algorithm == NsAlgorithm::gram,
                  .input = input,
                  .x = precision_of(options.dtype)};
  for (int step = 0; step < options.steps; ++step) {
    problem.coefficients.push_back(options.coefficients.row(step));
  }
  return problem;
}

inline Problem problem_of(const at::Tensor& x, const NewtonSchulz& options) {
  return problem_of(x.dim() == 3 ? x.size(0) : 1, x.size(-2), x.size(-1), options,
                    element_of(x.scalar_type()));
}

}  // namespace dmuon::cuda

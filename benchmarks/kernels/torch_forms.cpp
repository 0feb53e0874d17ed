#include "benchmarks/kernels/torch_forms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>

#include <array>

#include "kernels/newton_schulz.h"

namespace dmuon::bench {
namespace {

at::Tensor unit(const at::Tensor& x) {
  constexpr std::array<int64_t, 2> kMatrix = {-2, -1};
  return x / at::linalg_vector_norm(x, 2, kMatrix, /*keepdim=*/true).clamp_min(1e-7);
}

}  // namespace

at::Tensor torch_direct(const at::Tensor& in) {
  const bool tall = in.size(-2) > in.size(-1);
  at::Tensor x = unit(tall ? in.mT() : in);
  for (const auto& [a, b, c] : polar_express_coefficients().rows) {
    const at::Tensor gram = at::matmul(x, x.mT());
    x = a * x + at::matmul(b * gram + c * at::matmul(gram, gram), x);
  }
  return tall ? x.mT() : x;
}

at::Tensor torch_gram(const at::Tensor& in) {
  const bool tall = in.size(-2) > in.size(-1);
  const at::Tensor x = unit(tall ? in.mT() : in);
  at::Tensor r = at::matmul(x, x.mT()), q;
  for (const auto& [a, b, c] : polar_express_coefficients().rows) {
    const at::Tensor z = b * r + c * at::matmul(r, r);
    const at::Tensor rz = a * r + at::matmul(r, z);
    r = a * rz + at::matmul(z, rz);
    if (q.defined()) {
      q = a * q + at::matmul(z, q);
    } else {
      q = z.clone();
      q.diagonal(0, -2, -1).add_(a);
    }
  }
  x.copy_(at::matmul(q, x));
  return tall ? x.mT() : x;
}

}  // namespace dmuon::bench

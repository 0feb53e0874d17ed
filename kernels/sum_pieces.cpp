#include "kernels/sum_pieces.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/error.h"
#include "kernels/flat.h"

namespace dmuon {
namespace {

constexpr int64_t kBlock = 1024;  // floats that stay in the first-level cache

enum class Write { set, add };

float widened(float x) { return x; }
float widened(c10::BFloat16 x) { return x; }

// Without a branch, so that it vectorises: the exponent is rebiased by a product, which also brings
// subnormals to their place, and an infinity or a NaN gets its exponent back.
float widened(c10::Half x) {
  const uint32_t magnitude = x.x & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(x.x & 0x8000u) << 16;
  const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | special | sign);
}

template <class T>
void take(float* sum, const T* piece, Write write, int64_t n) {
  if (write == Write::set) {
    for (int64_t i = 0; i < n; ++i) sum[i] = widened(piece[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) sum[i] += widened(piece[i]);
  }
}

void take_range(float* sum, const at::Tensor& piece, Write write, int64_t begin, int64_t n) {
  switch (piece.scalar_type()) {
    case at::kBFloat16:
      return take(sum, piece.const_data_ptr<c10::BFloat16>() + begin, write, n);
    case at::kHalf:
      return take(sum, piece.const_data_ptr<c10::Half>() + begin, write, n);
    default:
      return take(sum, piece.const_data_ptr<float>() + begin, write, n);
  }
}

void store(float* out, const float* sum, float scale, Write write, int64_t n) {
  if (write == Write::set) {
    for (int64_t i = 0; i < n; ++i) out[i] = scale * sum[i];
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] + scale * sum[i];
  }
}

void sum_cpu(float* out, const std::vector<at::Tensor>& pieces, float scale, Write write,
             int64_t begin, int64_t end) {
  float sum[kBlock];
  for (; begin < end; begin += kBlock) {
    const int64_t n = std::min(kBlock, end - begin);
    Write next = Write::set;
    for (const at::Tensor& piece : pieces) {
      take_range(sum, piece, next, begin, n);
      next = Write::add;
    }
    store(out + begin, sum, scale, write, n);
  }
}

void sum_by_tensors(at::Tensor& out, const std::vector<at::Tensor>& pieces, double scale,
                    Write write) {
  at::Tensor sum = pieces[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  for (size_t i = 1; i < pieces.size(); ++i) sum.add_(pieces[i]);
  sum.mul_(scale);
  if (write == Write::set) {
    out.copy_(sum);
  } else {
    out.add_(sum);
  }
}

bool is_summable(const at::Tensor& x) {
  return is_flat(x, at::kFloat) || is_flat(x, at::kBFloat16) || is_flat(x, at::kHalf);
}

std::vector<at::Tensor> defined_pieces(const at::Tensor& out,
                                       const std::vector<at::Tensor>& pieces) {
  std::vector<at::Tensor> defined;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].defined()) continue;
    if (pieces[i].sizes() != out.sizes()) {
      throw ConfigError(message("sum_pieces: pieces[", i, "] has sizes ", pieces[i].sizes(),
                                "; out has ", out.sizes(), ". Give pieces of out's length."));
    }
    defined.push_back(pieces[i]);
  }
  return defined;
}

}  // namespace

void sum_pieces(at::Tensor out, const std::vector<at::Tensor>& pieces, double scale,
                bool accumulate) {
  const at::NoGradGuard no_grad;
  const Write write = accumulate ? Write::add : Write::set;
  const std::vector<at::Tensor> defined = defined_pieces(out, pieces);
  if (defined.empty()) {
    if (!accumulate) out.zero_();
  } else if (is_flat(out, at::kFloat) && std::all_of(defined.begin(), defined.end(), is_summable)) {
    float* data = out.mutable_data_ptr<float>();
    at::parallel_for(0, out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      sum_cpu(data, defined, static_cast<float>(scale), write, begin, end);
    });
  } else {
    sum_by_tensors(out, defined, scale, write);
  }
}

}  // namespace dmuon

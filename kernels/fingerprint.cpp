#include "kernels/fingerprint.h"

#include <ATen/ops/sum.h>

namespace dmuon {
namespace {

uint64_t of_words(const uint32_t* words, int64_t count) {
  uint64_t sum = 0, weighted = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = words[i];
    sum += word;
    weighted += word * static_cast<uint64_t>(2 * i + 1);
  }
  return sum * 0x9e3779b97f4a7c15 + weighted;
}

}  // namespace

uint64_t fingerprint(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const at::Tensor flat = tensor.detach().contiguous().view({-1}).view(at::kInt);
  const uint64_t print =
      flat.is_cpu() ? of_words(reinterpret_cast<const uint32_t*>(flat.const_data_ptr<int32_t>()),
                               flat.numel())
                    : static_cast<uint64_t>(flat.sum(at::kLong).item<int64_t>());
  return print | 1;
}

}  // namespace dmuon

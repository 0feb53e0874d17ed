#include "kernels/pack.h"

#include <cstring>

namespace dmuon {
namespace {

char* address(const at::Tensor& packed, int64_t offset) {
  return static_cast<char*>(packed.data_ptr()) + offset * packed.element_size();
}

bool can_memcpy(const at::Tensor& packed, const at::Tensor& tensor) {
  return packed.is_cpu() && tensor.is_cpu() && tensor.scalar_type() == packed.scalar_type() &&
         tensor.is_contiguous();
}

}  // namespace

void pack_one(const at::Tensor& packed, int64_t offset, int64_t numel, const at::Tensor& tensor) {
  if (numel == 0) return;
  const size_t bytes = numel * packed.element_size();
  if (!tensor.defined() && packed.is_cpu()) {
    std::memset(address(packed, offset), 0, bytes);
  } else if (!tensor.defined()) {
    packed.narrow(0, offset, numel).zero_();
  } else if (can_memcpy(packed, tensor)) {
    std::memcpy(address(packed, offset), tensor.data_ptr(), bytes);
  } else {
    packed.narrow(0, offset, numel).view(tensor.sizes()).copy_(tensor);
  }
}

void pack_flags(const at::Tensor& packed, int64_t offset, const at::Tensor* tensors, int count) {
  if (packed.is_cpu() && packed.scalar_type() == at::kFloat) {
    auto* flags = packed.data_ptr<float>() + offset;
    for (int i = 0; i < count; ++i) flags[i] = tensors[i].defined() ? 1 : 0;
    return;
  }
  for (int i = 0; i < count; ++i) {
    packed.narrow(0, offset + i, 1).fill_(tensors[i].defined() ? 1 : 0);
  }
}

}  // namespace dmuon

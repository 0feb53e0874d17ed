// Copies gradients into the flat buffer in which they travel.
#pragma once
#include <ATen/core/Tensor.h>

namespace dmuon {

// packed[offset, offset + numel) = tensor, cast; zeros where it is undefined. `packed` is 1-D and
// contiguous. A memcpy where dtype and layout allow it on the CPU.
void pack_one(const at::Tensor& packed, int64_t offset, int64_t numel, const at::Tensor& tensor);

// packed[offset + i] = tensors[i] is defined ? 1 : 0, for i < count.
void pack_flags(const at::Tensor& packed, int64_t offset, const at::Tensor* tensors, int count);

}  // namespace dmuon

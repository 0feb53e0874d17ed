#include "engine/buffer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <limits>

namespace dmuon {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

}  // namespace

FlatBuffer::FlatBuffer(int64_t numel, at::ScalarType dtype, const at::Device& device)
    : flat_(at::empty({numel}, at::TensorOptions().dtype(dtype).device(device))),
      nbytes_(static_cast<int64_t>(flat_.nbytes())) {
  free();
}

void FlatBuffer::allocate() {
  if (allocated()) return;
  auto* storage = storage_of(flat_);
  storage->set_data_ptr_noswap(storage->allocator()->allocate(nbytes_));
  storage->set_nbytes(nbytes_);
}

void FlatBuffer::free() {
  auto* storage = storage_of(flat_);
  storage->set_data_ptr_noswap(storage->allocator()->allocate(0));
  storage->set_nbytes(0);
}

bool FlatBuffer::allocated() const {
  return nbytes_ == 0 || storage_of(flat_)->nbytes() == static_cast<size_t>(nbytes_);
}

at::Tensor FlatBuffer::view(int64_t offset, at::IntArrayRef sizes) const {
  return flat_.narrow(0, offset, c10::multiply_integers(sizes)).view(sizes);
}

at::Tensor make_placeholder(const at::Tensor& like) {
  return at::full({}, std::numeric_limits<double>::quiet_NaN(), like.options().requires_grad(false))
      .expand(like.sizes());
}

bool is_placeholder(const at::Tensor& placeholder) {
  if (!placeholder.is_cpu() || placeholder.numel() == 0) return true;
  const void* value = placeholder.data_ptr();
  switch (placeholder.scalar_type()) {
    case at::kFloat:
      return std::isnan(*static_cast<const float*>(value));
    case at::kDouble:
      return std::isnan(*static_cast<const double*>(value));
    case at::kBFloat16:
      return std::isnan(static_cast<float>(*static_cast<const c10::BFloat16*>(value)));
    default:
      return std::isnan(static_cast<float>(*static_cast<const c10::Half*>(value)));
  }
}

void show(const at::Tensor& parameter, const at::Tensor& view) {
  auto* impl = parameter.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(view.storage(), view.dtype());
  impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
}

bool shows(const at::Tensor& parameter, const at::Tensor& view) {
  return parameter.has_storage() && storage_of(parameter) == storage_of(view);
}

}  // namespace dmuon

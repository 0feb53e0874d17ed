// Storage that comes and goes under tensors that stay.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace dmuon {

// A flat buffer whose memory is allocated and freed while its tensors, and the views that autograd
// has saved of them, stay valid objects. While it is free nobody may read them: an operator on CPU
// would follow a null pointer. Hence nothing here is registered on a module while it is free.
class FlatBuffer {
 public:
  FlatBuffer() = default;
  FlatBuffer(int64_t numel, at::ScalarType dtype, const at::Device& device);  // free at first

  void allocate();  // uninitialised; nothing happens if it is allocated
  void free();
  bool allocated() const;
  bool defined() const { return flat_.defined(); }
  int64_t nbytes() const { return nbytes_; }

  // The whole buffer, 1-D. Its version counter is its own: writing through it is unseen by
  // autograd.
  const at::Tensor& flat() const { return flat_; }
  // To be made while it is allocated; it stays valid afterwards.
  at::Tensor view(int64_t offset, at::IntArrayRef sizes) const;

 private:
  at::Tensor flat_;
  int64_t nbytes_ = 0;
};

// What a module holds between uses: one NaN, expanded to the parameter's sizes. Shape, numel and
// dtype stay true, four bytes of storage, and whatever is computed from it is NaN.
at::Tensor make_placeholder(const at::Tensor& like);

// Whether it still is: an in-place operation may have written into it. Not looked at on
// accelerators.
bool is_placeholder(const at::Tensor& placeholder);

// Makes `parameter` (same object, same autograd identity) show the memory, dtype, sizes and strides
// of `view`. Its version counter does not move.
void show(const at::Tensor& parameter, const at::Tensor& view);

// Whether `parameter` still shows the storage of `view`.
bool shows(const at::Tensor& parameter, const at::Tensor& view);

}  // namespace dmuon

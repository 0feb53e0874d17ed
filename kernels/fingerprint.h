// Tells whether a tensor has been written, by whatever way: a version counter does not move where
// an operation on a DTensor writes its local tensor.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmuon {

// Of the bits of a float32 tensor, one pass over memory; 0 for an undefined one alone. On the CPU
// it knows the place of each element, on an accelerator, where it waits for the device, only their
// sum.
uint64_t fingerprint(const at::Tensor& tensor);

}  // namespace dmuon

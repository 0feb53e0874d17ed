// Symmetric matrices at half their size, as they travel.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace dmuon {

// Elements of one triangle of an n x n matrix, its diagonal included.
constexpr int64_t triangle_elements(int64_t n) { return n * (n + 1) / 2; }

// packed [..., n (n + 1) / 2], its last dim contiguous = the upper triangle of square [..., n, n];
// what lies below the diagonal is not looked at. Folded into two rectangles, so that a dozen block
// copies do it and no index is made; not the order of LAPACK's packed storage.
void pack_triangle(at::Tensor packed, const at::Tensor& square);

// square = the symmetric matrix of that triangle.
void unpack_triangle(at::Tensor square, const at::Tensor& packed);

}  // namespace dmuon

// Sums whose order is fixed, and what a gradient is asked before it is used.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace dmuon {

// out = [out +] scale (((p0 + p1) + p2) + ...): strictly from left to right, in float32, one
// rounding per operation. No element depends on its place, on alignment or on the number of
// threads, so any cut of a buffer gives the same bits. out: float32; pieces: flat, of out's length,
// any mix of float32, bfloat16 and float16, out itself among them or not; an undefined piece is
// skipped. Without pieces the sum is zero. One pass over memory on the CPU, where all are
// contiguous; tensor operations elsewhere.
void sum_pieces(at::Tensor out, const std::vector<at::Tensor>& pieces, double scale,
                bool accumulate);

// Neither NaN nor infinity anywhere. Waits for the device.
bool all_finite(const at::Tensor& x);

// The sum of |x|^p, accumulated in float64; max|x| for p = infinity, and for p = 0 the number of
// elements that are not zero. NaN where x holds one. Throws ConfigError for a negative p.
double sum_of_powers(const at::Tensor& x, double p);

}  // namespace dmuon

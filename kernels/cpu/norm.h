// The scale of a matrix, before anything else is done to it.
#pragma once
#include <vector>

#include "kernels/cpu/panels.h"

namespace dmuon::cpu {

// The squares of the view's elements, added in float64 in an order that does not depend on the
// number of threads. float32 squared in float64 neither over- nor underflows.
double sum_of_squares(const TileKernels& kernels, const View& view, int threads);

// The view's elements, [rows, cols] row by row as float32, times the power of two that brings the
// largest into [1/2, 1). The view may be float64 here, and have any strides.
std::vector<float> scaled_copy(const TileKernels& kernels, const View& view);

// Every element = value.
void fill(const TileKernels& kernels, const View& view, float value);

}  // namespace dmuon::cpu

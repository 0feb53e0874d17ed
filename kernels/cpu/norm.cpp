#include "kernels/cpu/norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/threads.h"

namespace dmuon::cpu {
namespace {

double squares_of_row(const TileKernels& kernels, const View& view, int64_t first, int64_t n) {
  if (view.dtype == at::kFloat) {
    return kernels.sum_of_squares(static_cast<const float*>(view.data) + first, n);
  }
  constexpr int64_t kPiece = 512;
  float wide[kPiece];
  double sum = 0;
  for (int64_t i = 0; i < n; i += kPiece) {
    const int64_t piece = std::min(kPiece, n - i);
    to_float32(kernels, element(view.data, view.dtype, first + i), view.dtype, wide, piece);
    sum += kernels.sum_of_squares(wide, piece);
  }
  return sum;
}

double at(const TileKernels& kernels, const View& view, int64_t index) {
  if (view.dtype == at::kDouble) return static_cast<const double*>(view.data)[index];
  float value;
  to_float32(kernels, element(view.data, view.dtype, index), view.dtype, &value, 1);
  return value;
}

}  // namespace

double sum_of_squares(const TileKernels& kernels, const View& view, int threads) {
  const View rows = view.wide() ? view : view.transposed();
  constexpr int64_t kBlocks = 64;
  std::array<double, kBlocks> sums{};
  const int64_t rows_per_block = (rows.rows + kBlocks - 1) / kBlocks;
  for_each(threads, kBlocks, [&](int64_t block, int) {
    const int64_t end = std::min(rows.rows, (block + 1) * rows_per_block);
    for (int64_t row = block * rows_per_block; row < end; ++row) {
      sums[block] += squares_of_row(kernels, rows, row * rows.row_stride, rows.cols);
    }
  });
  double sum = 0;
  for (double of_block : sums) sum += of_block;
  return sum;
}

std::vector<float> scaled_copy(const TileKernels& kernels, const View& view) {
  double largest = 0;
  std::vector<double> wide;
  wide.reserve(view.rows * view.cols);
  for (int64_t r = 0; r < view.rows; ++r) {
    for (int64_t c = 0; c < view.cols; ++c) {
      wide.push_back(at(kernels, view, r * view.row_stride + c * view.col_stride));
      if (!(std::abs(wide.back()) <= largest)) largest = std::abs(wide.back());
    }
  }
  int exponent = 0;
  std::frexp(largest, &exponent);
  std::vector<float> out(wide.size());
  for (size_t i = 0; i < wide.size(); ++i) {
    out[i] = static_cast<float>(std::ldexp(wide[i], -exponent));
  }
  return out;
}

void fill(const TileKernels& kernels, const View& view, float value) {
  const View rows = view.wide() ? view : view.transposed();
  for (int64_t r = 0; r < rows.rows; ++r) {
    for (int64_t c = 0; c < rows.cols; ++c) {
      from_float32(kernels, &value, element(rows.data, rows.dtype, r * rows.row_stride + c),
                   rows.dtype, 1);
    }
  }
}

}  // namespace dmuon::cpu

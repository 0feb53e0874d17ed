// How operands lie in memory: in panels of `width` columns, each row by row.
//
// A product here is A^T B: row k of a panel of A and row k of one of B meet in one outer product. A
// symmetric matrix is its own transpose, so the chain's matrices are either operand as they lie and
// nothing is packed between two products.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/tile.h"

namespace dmuon::cpu {

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// A [depth, lanes] matrix, or a part of one. Tiles at the edge are whole ones: they write to the
// lanes beyond the last and to rows up to a multiple of a tile's rows, which no result reads.
struct Panels {
  Panels(float* data, const TileKernels& kernels, int64_t depth, int64_t lanes)
      : data(data),
        depth(depth),
        lanes(lanes),
        padded_depth(round_up(depth, kernels.rows)),
        width(kernels.width),
        stride(padded_depth * width) {}

  static int64_t floats(const TileKernels& kernels, int64_t depth, int64_t lanes) {
    return round_up(depth, kernels.rows) * round_up(lanes, kernels.width);
  }

  float* at(int64_t row, int64_t lane) const {
    return data + lane / width * stride + row * width + lane % width;
  }
  int64_t count() const { return (lanes + width - 1) / width; }

  // At most `most` lanes from `lane` on; both are multiples of the width.
  Panels lanes_from(int64_t lane, int64_t most) const {
    Panels part = *this;
    part.data = at(0, lane);
    part.lanes = std::min(most, lanes - lane);
    return part;
  }
  // At most `most` rows from `row` on; both are multiples of a tile's rows.
  Panels rows_from(int64_t row, int64_t most) const {
    Panels part = *this;
    part.data = at(row, 0);
    part.depth = std::min(most, depth - row);
    part.padded_depth = std::min(most, padded_depth - row);
    return part;
  }

  float* data;
  int64_t depth, lanes;
  int64_t padded_depth;
  int64_t width;
  int64_t stride;  // from one panel to the next
};

// A matrix of the caller's, [short, long] whichever way it lies: one of the strides is 1. Its
// dtype is float32, bfloat16 or float16.
struct View {
  void* data;
  at::ScalarType dtype;
  int64_t rows, cols;  // rows <= cols
  int64_t row_stride, col_stride;

  bool wide() const { return col_stride == 1; }  // it lies row by row
  View transposed() const { return {data, dtype, cols, rows, col_stride, row_stride}; }
};

// out = factor * rows [row, row + out.depth) x columns [col, col + out.lanes) of the view.
void pack(const TileKernels& kernels, const View& view, int64_t row, int64_t col, float factor,
          const Panels& out);

// Rows [row, row + in.depth) x columns [col, col + in.lanes) of the view = in. Rows of the view lie
// in one piece.
void unpack(const TileKernels& kernels, const Panels& in, const View& view, int64_t row,
            int64_t col);

// out = in rounded to bfloat16, rows 2k and 2k + 1 side by side in each float of row k; a missing
// last row is zero. out.depth == (in.depth + 1) / 2.
void to_pairs(const TileKernels& kernels, const Panels& in, const Panels& out);

// out = in^T: out.depth == in.lanes, out.lanes == in.depth.
void transpose(const TileKernels& kernels, const Panels& in, const Panels& out);

}  // namespace dmuon::cpu

#include "kernels/cpu/panels.h"

#include <cstring>

#include "kernels/cpu/convert.h"

namespace dmuon::cpu {
namespace {

void zero_padding(const Panels& out) {
  const int64_t last = out.lanes % out.width;
  for (int64_t lane = 0; lane < out.lanes; lane += out.width) {
    const int64_t pad = out.padded_depth - out.depth;
    std::memset(out.at(out.depth, lane), 0, pad * out.width * sizeof(float));
  }
  if (last == 0) return;
  for (int64_t k = 0; k < out.depth; ++k) {
    std::memset(out.at(k, out.lanes), 0, (out.width - last) * sizeof(float));
  }
}

// Rows of the view lie in one piece, and become rows of the panel.
void pack_along(const TileKernels& kernels, const View& view, int64_t row, int64_t col,
                float factor, const Panels& out) {
  for (int64_t k = 0; k < out.depth; ++k) {
    for (int64_t lane = 0; lane < out.lanes; lane += out.width) {
      const int64_t n = std::min(out.width, out.lanes - lane);
      const void* from = element(view.data, view.dtype, (row + k) * view.row_stride + col + lane);
      to_float32(kernels, from, view.dtype, out.at(k, lane), n, factor);
    }
  }
}

// Columns of the view lie in one piece, and each becomes a lane.
void pack_across(const TileKernels& kernels, const View& view, int64_t row, int64_t col,
                 float factor, const Panels& out) {
  constexpr int64_t kPiece = 128;
  float wide[kWidest * kPiece];
  for (int64_t lane = 0; lane < out.lanes; lane += out.width) {
    const int64_t n = std::min(out.width, out.lanes - lane);
    for (int64_t k = 0; k < out.depth; k += kPiece) {
      const int64_t piece = std::min(kPiece, out.depth - k);
      const int64_t first = (col + lane) * view.col_stride + row + k;
      const auto* from = static_cast<const float*>(element(view.data, view.dtype, first));
      int64_t stride = view.col_stride;
      if (view.dtype != at::kFloat) {
        for (int64_t i = 0; i < n; ++i) {
          to_float32(kernels, element(view.data, view.dtype, first + i * stride), view.dtype,
                     wide + i * kPiece, piece);
        }
        from = wide;
        stride = kPiece;
      }
      kernels.transpose(from, stride, out.at(k, lane), out.width, n, piece, factor);
    }
  }
}

}  // namespace

void pack(const TileKernels& kernels, const View& view, int64_t row, int64_t col, float factor,
          const Panels& out) {
  if (view.col_stride == 1) {
    pack_along(kernels, view, row, col, factor, out);
  } else {
    pack_across(kernels, view, row, col, factor, out);
  }
  zero_padding(out);
}

void unpack(const TileKernels& kernels, const Panels& in, const View& view, int64_t row,
            int64_t col) {
  for (int64_t k = 0; k < in.depth; ++k) {
    for (int64_t lane = 0; lane < in.lanes; lane += in.width) {
      const int64_t n = std::min(in.width, in.lanes - lane);
      from_float32(kernels, in.at(k, lane),
                   element(view.data, view.dtype, (row + k) * view.row_stride + col + lane),
                   view.dtype, n);
    }
  }
}

void to_pairs(const TileKernels& kernels, const Panels& in, const Panels& out) {
  const float zeros[kWidest] = {};
  for (int64_t lane = 0; lane < in.lanes; lane += in.width) {
    for (int64_t k = 0; k < out.depth; ++k) {
      const float* high = 2 * k + 1 < in.depth ? in.at(2 * k + 1, lane) : zeros;
      kernels.convert.narrow_to_pairs(in.at(2 * k, lane), high, out.at(k, lane), in.width);
    }
    std::memset(out.at(out.depth, lane), 0,
                (out.padded_depth - out.depth) * out.width * sizeof(float));
  }
}

void transpose(const TileKernels& kernels, const Panels& in, const Panels& out) {
  for (int64_t lane = 0; lane < in.lanes; lane += in.width) {
    const int64_t cols = std::min(in.width, out.padded_depth - lane);
    for (int64_t row = 0; row < in.depth; row += in.width) {
      const int64_t rows = std::min(in.width, in.padded_depth - row);
      kernels.transpose(in.at(row, lane), in.width, out.at(lane, row), out.width, rows, cols, 1);
    }
  }
}

}  // namespace dmuon::cpu

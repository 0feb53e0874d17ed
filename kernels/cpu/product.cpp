#include "kernels/cpu/product.h"

#include "kernels/cpu/threads.h"

namespace dmuon::cpu {
namespace {

// One panel of B at this depth stays in the first-level cache while A's rows pass by.
constexpr int64_t kDepth = 256;
// Rows of A at full depth stay in the second-level cache while panels of B pass by.
constexpr int64_t kPanelsOfRows = 4;

void multiply_tile(const TileKernels& kernels, const Product& p, int64_t row, int64_t lane,
                   int64_t lanes, int64_t k) {
  const Panels& c = k == 0 ? p.c : p.out;
  const int64_t vectors = (lanes + kernels.lanes - 1) / kernels.lanes;
  const auto multiply = p.pairs ? kernels.multiply_pairs : kernels.multiply;
  multiply[vectors - 1]({.a = p.a.at(k, row),
                         .b = p.b.at(k, lane),
                         .depth = std::min(kDepth, p.a.depth - k),
                         .c = c.at(row, lane),
                         .out = p.out.at(row, lane),
                         .out_stride = p.out.width,
                         .alpha = p.alpha,
                         .beta = k == 0 ? p.beta : 1});
}

// Rows [begin, end) of one panel; where `lower`, of each tile what reaches the diagonal or lies
// below it.
void multiply_panel(const TileKernels& kernels, const Product& p, int64_t begin, int64_t end,
                    int64_t lane, bool lower) {
  const int64_t all = std::min(p.out.width, p.out.lanes - lane);
  for (int64_t k = 0; k == 0 || k < p.a.depth; k += kDepth) {
    for (int64_t row = begin; row < end; row += kernels.rows) {
      const int64_t lanes = lower ? std::min(all, row + kernels.rows - lane) : all;
      multiply_tile(kernels, p, row, lane, lanes, k);
    }
  }
}

void mirror_within(const TileKernels& kernels, const Panels& out, int64_t lane, int64_t end) {
  constexpr int64_t kBlock = 8;
  for (int64_t row = lane; row < end; row += kBlock) {
    const int64_t rows = std::min(kBlock, end - row);
    kernels.transpose(out.at(row, lane), out.width, out.at(lane, row), out.width, rows, row - lane,
                      1);
    for (int64_t r = row; r < row + rows; ++r) {
      for (int64_t c = row; c < r; ++c) *out.at(c, r) = *out.at(r, c);
    }
  }
}

// Of the panel at `lane`, rows [begin, end), which begin at a panel's edge.
void mirror_panel(const TileKernels& kernels, const Panels& out, int64_t begin, int64_t end,
                  int64_t lane) {
  for (int64_t row = begin; row < end; row += out.width) {
    const int64_t rows = std::min(out.width, end - row);
    if (row == lane) {
      mirror_within(kernels, out, lane, row + rows);
    } else if (row > lane) {
      kernels.transpose(out.at(row, lane), out.width, out.at(lane, row), out.width, rows, out.width,
                        1);
    }
  }
}

// Blocks of rows and, of each, the panels up to the diagonal.
struct LowerBlocks {
  LowerBlocks(const Panels& out)
      : rows(kPanelsOfRows * out.width), blocks((out.lanes + rows - 1) / rows) {
    count = out.count();
    for (int64_t block = 0; block + 1 < blocks; ++block) count += (block + 1) * kPanelsOfRows;
  }

  // The last blocks first: they are the largest.
  std::pair<int64_t, int64_t> block_and_panel(int64_t task, int64_t panels) const {
    int64_t block = blocks - 1, of_block = panels;
    while (task >= of_block) {
      task -= of_block;
      of_block = block * kPanelsOfRows;
      --block;
    }
    return {block, task};
  }

  int64_t rows, blocks, count;
};

}  // namespace

void multiply_rows(const TileKernels& kernels, const Product& product, int64_t begin, int64_t end) {
  const Panels& out = product.out;
  const int64_t step = kPanelsOfRows * out.width;
  for (int64_t row = begin; row < end; row += step) {
    for (int64_t lane = 0; lane < out.lanes; lane += out.width) {
      multiply_panel(kernels, product, row, std::min(row + step, end), lane, /*lower=*/false);
    }
  }
}

void multiply_symmetric(const TileKernels& kernels, const Product& product, bool mirror,
                        int threads) {
  const Panels& out = product.out;
  const LowerBlocks blocks(out);
  for_each(threads, blocks.count, [&](int64_t task, int) {
    const auto [block, panel] = blocks.block_and_panel(task, out.count());
    const int64_t lane = panel * out.width;
    const int64_t end = std::min((block + 1) * blocks.rows, out.padded_depth);
    const int64_t begin = std::max(block * blocks.rows, lane);
    multiply_panel(kernels, product, begin, end, lane, /*lower=*/true);
    if (mirror) mirror_panel(kernels, out, begin, end, lane);
  });
}

}  // namespace dmuon::cpu

#include "kernels/cpu/product.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu/threads.h"

namespace dmuon::cpu {
namespace {

// One panel of B at this depth stays in the first-level cache while A's rows pass by.
constexpr int64_t kDepth = 256;
// Panels of A that, at full depth, stay in the second-level cache while those of B pass by. The
// more of them, the less often B comes from further away.
int64_t panels_per_block(const Panels& a) {
  constexpr int64_t kFloats = 192 * 1024;
  return std::clamp<int64_t>(kFloats / (std::min(a.depth, 4 * kDepth) * a.width), 4, 16);
}

// What the tiles of one panel of B have in common at one block of depth. Addresses are worked out
// per panel: a division per tile would cost as much as a twentieth of the tile.
struct PanelBlock {
  PanelBlock(const TileKernels& kernels, const Product& p, int64_t lane, int64_t k)
      : kernels(kernels),
        multiply(p.pairs ? kernels.multiply_pairs : kernels.multiply),
        c((k == 0 ? p.c : p.out).at(0, lane)),
        out(p.out.at(0, lane)),
        tile{.b = p.b.at(k, lane),
             .depth = std::min(kDepth, p.a.depth - k),
             .out_stride = p.out.width,
             .alpha = p.alpha,
             .beta = k == 0 ? p.beta : 1} {}

  // a: where A's lane `row` begins at this depth.
  void run(const float* a, int64_t row, int64_t vectors) {
    tile.a = a;
    tile.c = c + row * tile.out_stride;
    tile.out = out + row * tile.out_stride;
    multiply[vectors - 1](tile);
  }

  const TileKernels& kernels;
  void (*const* multiply)(const Tile&);
  const float* c;
  float* out;
  Tile tile;
};

// Rows [begin, end) of one panel, begin at the edge of a panel of A; where `lower`, of each tile
// what reaches the diagonal or lies below it.
void multiply_panel(const TileKernels& kernels, const Product& p, int64_t begin, int64_t end,
                    int64_t lane, bool lower) {
  const auto vectors_of = [&](int64_t lanes) {
    return (lanes + kernels.lanes - 1) / kernels.lanes;
  };
  const int64_t all = vectors_of(std::min(p.out.width, p.out.lanes - lane));
  for (int64_t k = 0; k == 0 || k < p.a.depth; k += kDepth) {
    PanelBlock block(kernels, p, lane, k);
    for (int64_t panel = begin; panel < end; panel += p.a.width) {
      const float* a = p.a.at(k, panel);
      for (int64_t row = panel; row < std::min(end, panel + p.a.width); row += kernels.rows) {
        const bool cut = lower && row < lane + p.out.width;
        const int64_t vectors = cut ? std::min(all, vectors_of(row + kernels.rows - lane)) : all;
        block.run(a + (row - panel), row, vectors);
      }
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
  LowerBlocks(const Panels& out, int64_t panels)
      : panels(panels), rows(panels * out.width), blocks((out.lanes + rows - 1) / rows) {
    count = out.count();
    for (int64_t block = 0; block + 1 < blocks; ++block) count += (block + 1) * panels;
  }

  // The last blocks first: they are the largest.
  std::pair<int64_t, int64_t> block_and_panel(int64_t task, int64_t all) const {
    int64_t block = blocks - 1, of_block = all;
    while (task >= of_block) {
      task -= of_block;
      of_block = block * panels;
      --block;
    }
    return {block, task};
  }

  int64_t panels, rows, blocks, count;
};

}  // namespace

void multiply_rows(const TileKernels& kernels, const Product& product, int64_t begin, int64_t end) {
  const Panels& out = product.out;
  const int64_t step = panels_per_block(product.a) * out.width;
  for (int64_t row = begin; row < end; row += step) {
    for (int64_t lane = 0; lane < out.lanes; lane += out.width) {
      multiply_panel(kernels, product, row, std::min(row + step, end), lane, /*lower=*/false);
    }
  }
}

void multiply_symmetric(const TileKernels& kernels, const Product& product, bool mirror,
                        int threads) {
  const Panels& out = product.out;
  const LowerBlocks blocks(out, panels_per_block(product.a));
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

// Where the blocks of a symmetric product lie. C++17: device code computes with it too.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define DMUON_HOST_DEVICE __host__ __device__
#else
#define DMUON_HOST_DEVICE
#endif

namespace dmuon::cuda {

enum class Element : int { float32, float16, bfloat16 };

DMUON_HOST_DEVICE constexpr int64_t bytes_of(Element element) {
  return element == Element::float32 ? 4 : 2;
}

DMUON_HOST_DEVICE constexpr int64_t lower_blocks(int64_t n) { return n * (n + 1) / 2; }

struct BlockIndex {
  int64_t row, col;  // row >= col
};

// The blocks of a lower triangle, row by row: 0 is (0, 0), 1 is (1, 0), 2 is (1, 1). Exact below
// 2^50, where the square root may be off by one and is put right.
DMUON_HOST_DEVICE inline BlockIndex lower_block(int64_t index) {
  int64_t row = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(index) + 1) - 1) / 2);
  if (lower_blocks(row + 1) <= index) ++row;
  if (lower_blocks(row) > index) --row;
  return {row, index - lower_blocks(row)};
}

// The blocks of a batch of symmetric products D = alpha A B + beta C: block (i, j) of D is panel i
// of A times panel j of B. All in bytes; offsets count from the start of the workspace.
struct BlockList {
  int64_t a, b, c, d;            // the first matrix of the batch
  int64_t a_stride, b_stride;    // from one matrix of the batch to the next
  int64_t d_stride;              // of C too
  int64_t a_panel, b_panel;      // from one panel to the next
  int64_t block_row, block_col;  // from one block of C and D to the one below, to the right
  int64_t blocks, batch;         // per side of one matrix; matrices
  int64_t pointers;              // offset of four arrays of size() pointers: A, B, C, D

  DMUON_HOST_DEVICE int64_t size() const { return batch * lower_blocks(blocks); }
};

struct BlockOffsets {
  int64_t a, b, c, d;
};

DMUON_HOST_DEVICE inline BlockOffsets block_offsets(const BlockList& list, int64_t index) {
  const int64_t matrix = index / lower_blocks(list.blocks);
  const BlockIndex block = lower_block(index % lower_blocks(list.blocks));
  const int64_t in_matrix = block.row * list.block_row + block.col * list.block_col;
  return {list.a + matrix * list.a_stride + block.row * list.a_panel,
          list.b + matrix * list.b_stride + block.col * list.b_panel,
          list.c + matrix * list.d_stride + in_matrix, list.d + matrix * list.d_stride + in_matrix};
}

}  // namespace dmuon::cuda

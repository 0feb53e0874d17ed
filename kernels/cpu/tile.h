// The innermost loops, one set per level of instructions. All else in this folder is plain C++ over
// this table.
#pragma once
#include <cstdint>

namespace dmuon::cpu {

enum class Isa;  // kernels/cpu/isa.h, which includes more than the files of one level may

// out = alpha A^T B + beta c for one tile. Row k of A and of B lies at k * width from row 0: see
// kernels/cpu/panels.h. c is not read where beta is 0; it may be out itself.
struct Tile {
  const float* a;
  const float* b;
  int64_t depth;
  const float* c;
  float* out;
  int64_t out_stride;  // between rows of out and of c
  float alpha;
  float beta;
};

// n elements. To float32 times a factor; from it, rounding to nearest even.
struct Conversions {
  void (*widen_bfloat16)(const uint16_t* from, float* to, int64_t n, float factor);
  void (*widen_float16)(const uint16_t* from, float* to, int64_t n, float factor);
  void (*narrow_to_bfloat16)(const float* from, uint16_t* to, int64_t n);
  void (*narrow_to_float16)(const float* from, uint16_t* to, int64_t n);
  // to[i] = the bits of low[i] and high[i] as bfloat16, low[i] in the lower half
  void (*narrow_to_pairs)(const float* low, const float* high, float* to, int64_t n);
};

inline constexpr int kMostVectors = 3;

struct TileKernels {
  int rows;   // of a tile
  int lanes;  // floats in a vector
  int width;  // of a panel: a multiple of lanes and of rows, at most kWidest
  // [v - 1]: a tile of `rows` x v * lanes, for v * lanes <= width
  void (*multiply[kMostVectors])(const Tile&);
  // The same with a and b in pairs of bfloat16, a row of the panel being two of the matrix. null
  // where there is no such instruction.
  void (*multiply_pairs[kMostVectors])(const Tile&);
  // to[c * to_stride + r] = factor * from[r * from_stride + c]
  void (*transpose)(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                    int64_t rows, int64_t cols, float factor);
  // to = factor * from
  void (*scale)(const float* from, float* to, int64_t n, float factor);
  // In float64, in a fixed order.
  double (*sum_of_squares)(const float* x, int64_t n);
  Conversions convert;
};

inline constexpr int kWidest = 32;

const TileKernels& tile_kernels(Isa isa);

extern const TileKernels portable_kernels, avx2_kernels, avx512_kernels, avx512_bf16_kernels;

}  // namespace dmuon::cpu

// The loops behind kernels/cpu/tile.h, over a vector type V:
//   V::Reg, V::kLanes, V::zero(), V::set(float), V::load(p), V::store(p, reg), V::fma(a, b, c),
//   V::mul(a, b), V::broadcast(p); V::Wide, V::add_squares(p, sums), V::total(sums): in float64;
//   V::kBlock, V::transpose(from, from_stride, to, to_stride, factor) of a kBlock x kBlock block.
// Included only by the files that are compiled for one level of instructions. Everything here has
// internal linkage, and nothing else is included: an inline function of the standard library that
// was compiled for a newer processor could be the copy that the linker keeps for all.
#pragma once
#include "kernels/cpu/convert_loops.h"
#include "kernels/cpu/tile.h"

namespace dmuon::cpu {
namespace {

template <class V, int kRows, int kVectors>
struct Accumulators {
  typename V::Reg sum[kRows][kVectors];

  template <class Dot, int kWidth>
  void run(const Tile& t) {
    const float* a = t.a;
    const float* b = t.b;
#pragma GCC unroll 4
    for (int64_t k = 0; k < t.depth; ++k, a += kWidth, b += kWidth) {
      typename V::Reg right[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) right[v] = V::load(b + v * V::kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const typename V::Reg left = V::broadcast(a + r);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Dot::fma(left, right[v], sum[r][v]);
      }
    }
  }
};

// Dot: V itself, or what multiplies pairs of bfloat16 and adds in V.
template <class V, class Dot, int kRows, int kVectors, int kWidth>
void multiply(const Tile& t) {
  Accumulators<V, kRows, kVectors> tile;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) tile.sum[r][v] = V::zero();
  }
  tile.template run<Dot, kWidth>(t);
  const typename V::Reg alpha = V::set(t.alpha), beta = V::set(t.beta);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = r * t.out_stride + v * V::kLanes;
      typename V::Reg value = V::mul(alpha, tile.sum[r][v]);
      if (t.beta != 0) value = V::fma(beta, V::load(t.c + at), value);
      V::store(t.out + at, value);
    }
  }
}

template <class V>
void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
               int64_t cols, float factor) {
  constexpr int64_t kBlock = V::kBlock;
  const int64_t whole_rows = rows - rows % kBlock, whole_cols = cols - cols % kBlock;
  // Rows outside: at a stride that is a power of two, more of them than the cache has ways evict
  // each other.
  for (int64_t r = 0; r < whole_rows; r += kBlock) {
    for (int64_t c = 0; c < whole_cols; c += kBlock) {
      V::transpose(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride,
                   factor);
    }
  }
  for (int64_t c = 0; c < cols; ++c) {
    for (int64_t r = c < whole_cols ? whole_rows : 0; r < rows; ++r) {
      to[c * to_stride + r] = factor * from[r * from_stride + c];
    }
  }
}

template <class V>
void scale(const float* from, float* to, int64_t n, float factor) {
  const typename V::Reg by = V::set(factor);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(to + i, V::mul(by, V::load(from + i)));
  for (; i < n; ++i) to[i] = factor * from[i];
}

template <class V>
double sum_of_squares(const float* x, int64_t n) {
  typename V::Wide sums[4] = {};
  int64_t i = 0;
  for (; i + 2 * V::kLanes <= n; i += 2 * V::kLanes) {
    V::add_squares(x + i, sums);
    V::add_squares(x + i + V::kLanes, sums + 2);
  }
  double sum = V::total(sums);
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

}  // namespace
}  // namespace dmuon::cpu

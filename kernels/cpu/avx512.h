// The vector type of the two AVX-512 levels. See kernels/cpu/tile_kernels.h.
#pragma once
#include "kernels/cpu/tile_kernels.h"
#include "kernels/cpu/transpose_avx.h"

namespace dmuon::cpu {
namespace {

struct Avx512 : TransposeAvx {
  using Reg = __m512;
  using Wide = __m512d;
  static constexpr int kLanes = 16;

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg set(float x) { return _mm512_set1_ps(x); }
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static Reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }

  static void add_squares(const float* x, Wide* sums) {
    for (int half = 0; half < 2; ++half) {
      const Wide wide = _mm512_cvtps_pd(_mm256_loadu_ps(x + 8 * half));
      sums[half] = _mm512_fmadd_pd(wide, wide, sums[half]);
    }
  }
  static double total(const Wide* sums) {
    return _mm512_reduce_add_pd((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
};

inline constexpr int kAvx512Rows = 8;
inline constexpr int kAvx512Width = 32;

template <class Dot, int kVectors>
constexpr auto kAvx512Multiply = multiply<Avx512, Dot, kAvx512Rows, kVectors, kAvx512Width>;

}  // namespace
}  // namespace dmuon::cpu

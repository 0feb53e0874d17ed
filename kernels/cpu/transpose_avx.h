// An 8 x 8 transpose in eight AVX registers, for the files compiled with AVX2 or more.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace dmuon::cpu {
namespace {

struct TransposeAvx {
  static constexpr int kBlock = 8;

  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                        float factor) {
    const __m256 by = _mm256_set1_ps(factor);
    __m256 x[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      // Rows i and i + 4, by halves: what is left are four 4 x 4 transposes in one.
      const float* low = from + i * from_stride;
      const float* high = from + (i + 4) * from_stride;
      x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
      x[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low + 4)),
                                      _mm_loadu_ps(high + 4), 1);
    }
#pragma GCC unroll 8
    for (int half = 0; half < 8; half += 4) {
      y[half] = _mm256_unpacklo_ps(x[half], x[half + 1]);
      y[half + 1] = _mm256_unpackhi_ps(x[half], x[half + 1]);
      y[half + 2] = _mm256_unpacklo_ps(x[half + 2], x[half + 3]);
      y[half + 3] = _mm256_unpackhi_ps(x[half + 2], x[half + 3]);
      x[half] = _mm256_shuffle_ps(y[half], y[half + 2], 0x44);
      x[half + 1] = _mm256_shuffle_ps(y[half], y[half + 2], 0xee);
      x[half + 2] = _mm256_shuffle_ps(y[half + 1], y[half + 3], 0x44);
      x[half + 3] = _mm256_shuffle_ps(y[half + 1], y[half + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + i * to_stride, _mm256_mul_ps(by, x[i]));
  }
};

}  // namespace
}  // namespace dmuon::cpu

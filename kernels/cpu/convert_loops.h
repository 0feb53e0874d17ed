// 16-bit floats to float32 and back, to nearest even. Plain integer arithmetic without branches,
// which each file compiled for one level of instructions turns into its own vectors.
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "kernels/cpu/tile.h"

namespace dmuon::cpu {
namespace {

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float from_bfloat16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// A product with 2^112 moves the exponent, and is right for subnormals too; what overflows the 16
// bits' exponent is infinite or NaN.
inline float from_float16(uint16_t x) {
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fff) << 13;
  const uint32_t usual = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000 | magnitude : 0;
  return float_of(usual | special | static_cast<uint32_t>(x & 0x8000) << 16);
}

// Below 2^-14, where the 16 bits have no more exponents, an addition to 1/2 rounds to 2^-24.
inline uint16_t to_float16(float x) {
  const uint32_t magnitude = bits_of(x) & 0x7fffffff;
  const uint32_t normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;
  half = magnitude > 0x7f800000 ? 0x7e00 : half;
  return static_cast<uint16_t>(half | (bits_of(x) >> 16 & 0x8000));
}

template <float (*kConvert)(uint16_t)>
void widen(const uint16_t* __restrict from, float* __restrict to, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) to[i] = factor * kConvert(from[i]);
}

template <uint16_t (*kConvert)(float)>
void narrow(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = kConvert(from[i]);
}

inline void narrow_to_pairs(const float* __restrict low, const float* __restrict high,
                            float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = float_of(static_cast<uint32_t>(to_bfloat16(high[i])) << 16 | to_bfloat16(low[i]));
  }
}

#if defined(__F16C__)
inline void widen_float16(const uint16_t* __restrict from, float* __restrict to, int64_t n,
                          float factor) {
  const __m256 by = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_mul_ps(by, _mm256_cvtph_ps(half)));
  }
  widen<from_float16>(from + i, to + i, n - i, factor);
}

inline void narrow_to_float16(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  narrow<to_float16>(from + i, to + i, n - i);
}
#else
constexpr auto widen_float16 = widen<from_float16>;
constexpr auto narrow_to_float16 = narrow<to_float16>;
#endif

constexpr Conversions kConversions = {
    .widen_bfloat16 = widen<from_bfloat16>,
    .widen_float16 = widen_float16,
    .narrow_to_bfloat16 = narrow<to_bfloat16>,
    .narrow_to_float16 = narrow_to_float16,
    .narrow_to_pairs = narrow_to_pairs,
};

}  // namespace
}  // namespace dmuon::cpu

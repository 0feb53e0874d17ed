#include "kernels/cpu/tile_kernels.h"
#include "kernels/cpu/transpose_avx.h"

namespace dmuon::cpu {
namespace {

struct Avx2 : TransposeAvx {
  using Reg = __m256;
  using Wide = __m256d;
  static constexpr int kLanes = 8;

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set(float x) { return _mm256_set1_ps(x); }
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static Reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }

  static void add_squares(const float* x, Wide* sums) {
    for (int half = 0; half < 2; ++half) {
      const Wide wide = _mm256_cvtps_pd(_mm_loadu_ps(x + 4 * half));
      sums[half] = _mm256_fmadd_pd(wide, wide, sums[half]);
    }
  }
  static double total(const Wide* sums) {
    double each[4];
    _mm256_storeu_pd(each, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    return (each[0] + each[1]) + (each[2] + each[3]);
  }
};

template <int kVectors>
constexpr auto kMultiply = multiply<Avx2, Avx2, 4, kVectors, 24>;

}  // namespace

// Twelve accumulators, three vectors of B and one of A are all sixteen registers.
const TileKernels avx2_kernels = {
    .rows = 4,
    .lanes = 8,
    .width = 24,
    .multiply = {kMultiply<1>, kMultiply<2>, kMultiply<3>},
    .multiply_pairs = {},
    .transpose = transpose<Avx2>,
    .scale = scale<Avx2>,
    .sum_of_squares = sum_of_squares<Avx2>,
    .convert = kConversions,
};

}  // namespace dmuon::cpu

#include "kernels/cpu/avx512.h"

namespace dmuon::cpu {
namespace {

struct Pairs {
  static __m512 fma(__m512 a, __m512 b, __m512 c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
};

}  // namespace

const TileKernels avx512_bf16_kernels = {
    .rows = kAvx512Rows,
    .lanes = Avx512::kLanes,
    .width = kAvx512Width,
    .multiply = {kAvx512Multiply<Avx512, 1>, kAvx512Multiply<Avx512, 2>},
    .multiply_pairs = {kAvx512Multiply<Pairs, 1>, kAvx512Multiply<Pairs, 2>},
    .transpose = transpose<Avx512>,
    .scale = scale<Avx512>,
    .sum_of_squares = sum_of_squares<Avx512>,
    .convert = kConversions,
};

}  // namespace dmuon::cpu

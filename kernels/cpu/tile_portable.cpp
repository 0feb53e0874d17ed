#include "kernels/cpu/tile_kernels.h"

namespace dmuon::cpu {
namespace {

// Four floats in the compiler's own vector type: SSE2 on x86-64, NEON on ARM.
struct Portable {
  typedef float Reg __attribute__((vector_size(16)));
  typedef double Wide __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kBlock = 4;

  static Reg zero() { return Reg{}; }
  static Reg set(float x) { return Reg{x, x, x, x}; }
  static Reg load(const float* p) { return Reg{p[0], p[1], p[2], p[3]}; }
  static void store(float* p, Reg x) {
    for (int i = 0; i < kLanes; ++i) p[i] = x[i];
  }
  static Reg broadcast(const float* p) { return set(*p); }
  static Reg mul(Reg a, Reg b) { return a * b; }
  static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }

  static void add_squares(const float* x, Wide* sums) {
    for (int half = 0; half < 2; ++half) {
      const Wide wide = {x[2 * half], x[2 * half + 1]};
      sums[half] += wide * wide;
    }
  }
  static double total(const Wide* sums) {
    const Wide sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return sum[0] + sum[1];
  }
  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                        float factor) {
    for (int c = 0; c < kBlock; ++c) {
      for (int r = 0; r < kBlock; ++r) to[c * to_stride + r] = factor * from[r * from_stride + c];
    }
  }
};

template <int kVectors>
constexpr auto kMultiply = multiply<Portable, Portable, 4, kVectors, 8>;

}  // namespace

const TileKernels portable_kernels = {
    .rows = 4,
    .lanes = 4,
    .width = 8,
    .multiply = {kMultiply<1>, kMultiply<2>},
    .multiply_pairs = {},
    .transpose = transpose<Portable>,
    .scale = scale<Portable>,
    .sum_of_squares = sum_of_squares<Portable>,
    .convert = kConversions,
};

}  // namespace dmuon::cpu

#include "benchmarks/kernels/measure.h"
#include "kernels/cpu/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dmuon::bench {
namespace {

constexpr int64_t kRounds = 500000;
constexpr int kSums = 12;
volatile float keep;

// kSums independent sums, named so that none of them leaves its register.
#define DMUON_EACH_SUM(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_add_avx2() {
  const __m256 x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(0.25f);
#define DMUON_OP(i) __m256 s##i = x * (1.0f + i);
  DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
  for (int64_t k = 0; k < kRounds; ++k) {
#define DMUON_OP(i) s##i = _mm256_fmadd_ps(s##i, x, y);
    DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
  }
#define DMUON_OP(i) keep = s##i[0];
  DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
}

__attribute__((target("avx512f"))) void multiply_add_avx512() {
  const __m512 x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(0.25f);
#define DMUON_OP(i) __m512 s##i = x * (1.0f + i);
  DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
  for (int64_t k = 0; k < kRounds; ++k) {
#define DMUON_OP(i) s##i = _mm512_fmadd_ps(s##i, x, y);
    DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
  }
#define DMUON_OP(i) keep = s##i[0];
  DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
}

__attribute__((target("avx512f,avx512bf16"))) void multiply_add_bf16() {
  const __m512 x = _mm512_set1_ps(0.5f);
  const auto pairs = (__m512bh)x;
#define DMUON_OP(i) __m512 s##i = x * (1.0f + i);
  DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
  for (int64_t k = 0; k < kRounds; ++k) {
#define DMUON_OP(i) s##i = _mm512_dpbf16_ps(s##i, pairs, pairs);
    DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
  }
#define DMUON_OP(i) keep = s##i[0];
  DMUON_EACH_SUM(DMUON_OP)
#undef DMUON_OP
}

Peak of(cpu::Isa isa) {
  const auto rate = [](void (*loop)(), int flops) {
    const double time = fastest(Clock::thread_cpu, 25, {[loop] { loop(); }})[0];
    return static_cast<double>(kRounds) * kSums * flops / time * 1e-9;
  };
  Peak peak;
  if (isa == cpu::Isa::avx2) peak.float32 = rate(multiply_add_avx2, 16);
  if (isa >= cpu::Isa::avx512) peak.float32 = rate(multiply_add_avx512, 32);
  if (isa == cpu::Isa::avx512_bf16) peak.bfloat16 = rate(multiply_add_bf16, 64);
  return peak;
}
#else
Peak of(cpu::Isa) { return {}; }
#endif

}  // namespace

Peak measure_peak() { return of(cpu::active_isa()); }

}  // namespace dmuon::bench

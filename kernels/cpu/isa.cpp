#include "kernels/cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "kernels/error.h"

namespace dmuon::cpu {
namespace {

constexpr int kNotForced = -1;
std::atomic<int> forced{kNotForced};

#if defined(__x86_64__)
// Not every compiler's builtin knows this one.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool runs(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case Isa::avx512:
      return runs(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case Isa::avx512_bf16:
      return runs(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
  }
  return false;
}

bool is_amd() { return __builtin_cpu_is("amd"); }
#else
bool runs(Isa isa) { return isa == Isa::portable; }
bool is_amd() { return false; }
#endif

void require_available(Isa isa, const char* who) {
  if (runs(isa)) return;
  throw ConfigError(message(who, " asks for the instructions '", isa_name(isa),
                            "', which this processor does not have; its highest level is '",
                            isa_name(available_isas().back()), "'."));
}

Isa named(const std::string& name) {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (name == isa_name(isa)) return isa;
  }
  throw ConfigError(
      message("DMUON_ISA is '", name, "'; it must be portable, avx2, avx512 or avx512_bf16."));
}

// Zen issues twice as many 16-bit products as float32 ones in a cycle; the Xeons that have the
// instruction half as many.
Isa fastest() {
  const Isa highest = available_isas().back();
  return highest == Isa::avx512_bf16 && !is_amd() ? Isa::avx512 : highest;
}

Isa from_environment() {
  const char* name = std::getenv("DMUON_ISA");
  if (name == nullptr || *name == '\0') return fastest();
  const Isa isa = named(name);
  require_available(isa, "DMUON_ISA");
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) {
  static constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(isa)];
}

std::vector<Isa> available_isas() {
  std::vector<Isa> all = {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16};
  std::erase_if(all, [](Isa isa) { return !runs(isa); });
  return all;
}

Isa active_isa() {
  const int isa = forced.load(std::memory_order_relaxed);
  if (isa != kNotForced) return static_cast<Isa>(isa);
  static const Isa chosen = from_environment();
  return chosen;
}

void force_isa(std::optional<Isa> isa) {
  if (isa) require_available(*isa, "force_isa");
  forced = isa ? static_cast<int>(*isa) : kNotForced;
}

}  // namespace dmuon::cpu

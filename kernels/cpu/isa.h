// Which instructions the kernels of this folder use, chosen once at run time.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace dmuon::cpu {

// Each level has what the ones before it have. portable: whatever the compiler's baseline is.
enum class Isa { portable, avx2, avx512, avx512_bf16 };
inline constexpr int kIsas = 4;

const char* isa_name(Isa isa);

// What this processor and its operating system can run, from the lowest up.
std::vector<Isa> available_isas();

// The fastest of them, or the one that the environment variable DMUON_ISA names ("portable",
// "avx2", "avx512", "avx512_bf16"), read once. ConfigError where that one is not available. The
// fastest is the highest, but for processors whose 16-bit products are no faster than float32 ones:
// there avx512_bf16 is used only by name.
Isa active_isa();

// Overrides active_isa() for the whole process; nullopt takes that back. For tests and benchmarks,
// between calls of the kernels. ConfigError where it is not available.
void force_isa(std::optional<Isa> isa);

}  // namespace dmuon::cpu

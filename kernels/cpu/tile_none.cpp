// In place of the files for x86-64: isa.cpp finds none of these levels available.
#include "kernels/cpu/tile.h"

namespace dmuon::cpu {

const TileKernels avx2_kernels{}, avx512_kernels{}, avx512_bf16_kernels{};

}  // namespace dmuon::cpu

#include "kernels/cpu/isa.h"
#include "kernels/cpu/tile.h"

namespace dmuon::cpu {

const TileKernels& tile_kernels(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return portable_kernels;
    case Isa::avx2:
      return avx2_kernels;
    case Isa::avx512:
      return avx512_kernels;
    case Isa::avx512_bf16:
      return avx512_bf16_kernels;
  }
  return portable_kernels;
}

}  // namespace dmuon::cpu

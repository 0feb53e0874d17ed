#include "kernels/cpu/avx512.h"

namespace dmuon::cpu {

const TileKernels avx512_kernels = {
    .rows = kAvx512Rows,
    .lanes = Avx512::kLanes,
    .width = kAvx512Width,
    .multiply = {kAvx512Multiply<Avx512, 1>, kAvx512Multiply<Avx512, 2>},
    .multiply_pairs = {},
    .transpose = transpose<Avx512>,
    .scale = scale<Avx512>,
    .sum_of_squares = sum_of_squares<Avx512>,
    .convert = kConversions,
};

}  // namespace dmuon::cpu

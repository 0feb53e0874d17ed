// Products of matrices in panels. The sums of an element are taken in one fixed order, so the bits
// do not depend on who computes it.
#pragma once
#include <cstdint>

#include "kernels/cpu/panels.h"

namespace dmuon::cpu {

// out = alpha A^T B + beta c. c may be out; neither may overlap a or b. pairs: a and b are pairs of
// bfloat16 (to_pairs), for kernels that have the instruction.
struct Product {
  const Panels& a;
  const Panels& b;
  float alpha = 1;
  float beta = 0;
  const Panels& c;
  const Panels& out;
  bool pairs = false;
};

// The tiles of rows [begin, end), in multiples of a tile's rows, and all of out's panels.
void multiply_rows(const TileKernels& kernels, const Product& product, int64_t begin, int64_t end);

// Where the product is known to be symmetric (A = B, or two that commute): one triangle is
// computed, and copied to the other one unless `mirror` is false; then only the lower one holds.
void multiply_symmetric(const TileKernels& kernels, const Product& product, bool mirror,
                        int threads);

}  // namespace dmuon::cpu

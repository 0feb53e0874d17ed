// What a product multiplies: a matrix in panels as it is, or its rounding to pairs of bfloat16.
#pragma once
#include "kernels/cpu/panels.h"
#include "kernels/cpu/threads.h"
#include "kernels/cpu/workspace.h"

namespace dmuon::cpu {

class Operand {
 public:
  // In pairs where `bfloat16`: then it takes floats() from the arena, and holds what `of` held when
  // round() was called.
  Operand(const TileKernels& kernels, bool bfloat16, const Panels& of, Arena& arena)
      : kernels_(kernels),
        of_(of),
        pairs_(bfloat16 ? arena.take(floats(kernels, true, of.depth, of.lanes)) : nullptr, kernels,
               (of.depth + 1) / 2, of.lanes) {}

  static int64_t floats(const TileKernels& kernels, bool bfloat16, int64_t depth, int64_t lanes) {
    return bfloat16 ? Arena::rounded(Panels::floats(kernels, (depth + 1) / 2, lanes)) : 0;
  }

  const Panels& panels() const { return pairs_.data != nullptr ? pairs_ : of_; }

  void round(int threads = 1) const {
    if (pairs_.data == nullptr) return;
    for_each(threads, of_.count(), [&](int64_t panel, int) {
      const int64_t lane = panel * of_.width;
      to_pairs(kernels_, of_.lanes_from(lane, of_.width), pairs_.lanes_from(lane, of_.width));
    });
  }

 private:
  const TileKernels& kernels_;
  Panels of_, pairs_;
};

}  // namespace dmuon::cpu

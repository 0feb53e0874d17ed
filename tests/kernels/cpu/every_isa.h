// Runs a claim at each level of instructions that this machine has.
#pragma once
#include <gtest/gtest.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/tile.h"

namespace dmuon::cpu {

class EveryIsa : public ::testing::TestWithParam<Isa> {
 protected:
  EveryIsa() { force_isa(GetParam()); }
  ~EveryIsa() override { force_isa(std::nullopt); }

  const TileKernels& kernels() const { return tile_kernels(GetParam()); }
};

inline std::string name_of(const ::testing::TestParamInfo<Isa>& info) {
  return isa_name(info.param);
}

}  // namespace dmuon::cpu

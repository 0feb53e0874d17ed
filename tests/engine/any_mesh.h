// Claims that hold on any mesh: shards and replicas, shards and TP ranks, and all three.
#pragma once
#include <gtest/gtest.h>

#include "engine/error.h"
#include "tests/support/tiny_training.h"

namespace dmuon {

struct MeshCase {
  int replicate, shard, tp;
  int ranks() const { return replicate * shard * tp; }
  testing::TinyOptions options() const {
    return {.mesh = {.shard = shard, .replicate = replicate, .tp = tp},
            .cuts = tp > 1 ? testing::some_cuts(tp) : testing::Cuts()};
  }
};

inline std::string mesh_name(const ::testing::TestParamInfo<MeshCase>& info) {
  return message(info.param.replicate, "x", info.param.shard, "x", info.param.tp);
}

class AnyMesh : public ::testing::TestWithParam<MeshCase> {
 protected:
  using Weights = testing::Weights;
  testing::TinyOptions options() const { return GetParam().options(); }
  Weights run(const testing::TinyOptions& options, const testing::Script& script,
              uint64_t seed = 0) const {
    return testing::trained(GetParam().ranks(), options, script, seed);
  }
  Weights run(const testing::Script& script) const { return run(options(), script); }
  Weights untrained() const {
    return run([](testing::TinyJob&, int, int) {});
  }
};

template <class Job>
void backward(Job& job, const at::Tensor& x) {
  testing::loss_of(job.forward(x)).backward();
}

inline at::Tensor share(int seed, int cell, int cells) {
  return testing::share_of(testing::tiny_batch(seed, testing::kRows), cell, cells);
}

inline constexpr const char* kNames[] = {"blocks.0.down", "blocks.0.up", "blocks.1.down",
                                         "blocks.1.up"};

}  // namespace dmuon

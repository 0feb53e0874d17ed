// One reduction of one unit: every rank's gradient goes to the matrix's owner, which sums them.
//
// An exchange (all-to-all) and a sum in rank order on the owner instead of the backend's reduce:
// (N-1)P bytes in the whole job, where gloo's reduce takes 1.25 times that on 4 ranks; the sum is
// in float32 whatever dtype travels; and its order is fixed, so the bits depend neither on packing
// nor on who owns what.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/transport.h"
#include "engine/unit_store.h"

namespace dmuon {

class Reduction {
 public:
  // `gradients`: one per slot of the unit, undefined where this rank has none (it sends zeros).
  // They are read when the reduction runs. The sum is divided by `divisor`.
  Reduction(const UnitStore& unit, std::vector<at::Tensor> gradients, at::ScalarType dtype,
            double divisor);

  // Collective. Once. Runs on the reduce lane.
  void run(Transport& transport);

  // After `run`, of an owned slot: the mean in float32, in the parameter's sizes; undefined where
  // no rank had a gradient.
  at::Tensor result(int slot) const;

 private:
  void run_transfer(Transport& transport, const std::vector<int>& segments);
  void pack(const SegmentStore& segment, at::Tensor out) const;
  void sum(int segment, const std::vector<at::Tensor>& pieces);

  const UnitStore& unit_;
  std::vector<at::Tensor> gradients_;
  at::ScalarType dtype_;
  double divisor_;
  at::Device device_;
  struct Result {
    at::Tensor gradient;
    at::Tensor senders;  // one element: how many ranks had a gradient
  };
  std::vector<Result> results_;  // per slot
};

}  // namespace dmuon

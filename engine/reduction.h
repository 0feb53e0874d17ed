// One reduction of one unit over the data-parallel axes: within each replica to the segment's
// holder, then over the replicas to its owner.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "engine/summing_exchange.h"
#include "engine/transport.h"
#include "engine/unit_store.h"

namespace dmuon {

class Reduction {
 public:
  // `gradients`: one per slot of the unit, undefined where this rank has none (it sends zeros). The
  // sum is divided by `divisor`.
  Reduction(const UnitStore& unit, std::vector<at::Tensor> gradients, at::ScalarType dtype,
            double divisor);

  // Collective over the shard axis: packs and issues. Lets the gradients go.
  void start(Transport& shard);
  // Waits and sums; then, where there is a replicate axis, the same over it: collective. From any
  // thread, once. `replicate` may be null.
  void finish(Transport* replicate);

  // After `finish`, of an owned slot: the mean in float32, in the parameter's sizes; undefined
  // where no rank had a gradient.
  at::Tensor result(int slot) const;

  int64_t nbytes() const { return within_->nbytes(); }  // what the sum reads; after `start`
  bool on_host() const { return options_.device().is_cpu(); }

 private:
  void pack(const SegmentStore& segment, const at::Tensor& packed, int64_t offset) const;
  at::Tensor over_replicas(const at::Tensor& sums, Transport& replicate) const;

  const UnitStore& unit_;
  std::vector<at::Tensor> gradients_;
  at::TensorOptions options_;
  double divisor_;
  std::unique_ptr<SummingExchange> within_;
  at::Tensor sum_;  // of the owned segments, one after the other
};

}  // namespace dmuon

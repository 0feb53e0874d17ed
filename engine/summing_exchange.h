// One all-to-all over one axis, and on each receiver a sum in rank order.
//
// Instead of the backend's reduce: (N-1)P bytes in the whole job, where gloo's reduce takes 1.25
// times that on 4 ranks; the sum is in float32 whatever dtype travels; and its order is fixed, so
// the bits depend neither on packing nor on who owns what.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/transport.h"

namespace dmuon {

class SummingExchange {
 public:
  // Collective. `counts[r]`: elements for rank r of the axis. `fill(r, packed, offset)` writes
  // them.
  SummingExchange(Transport& transport, const std::vector<int64_t>& counts,
                  const at::TensorOptions& options, const std::string& name,
                  const std::function<void(int r, const at::Tensor& packed, int64_t offset)>& fill);

  // Waits. What came for this rank, summed and scaled, float32; empty where nothing did. Once.
  at::Tensor finish(double scale);

  int64_t nbytes() const { return own_ * size_ * packed_.element_size(); }  // what the sum reads

 private:
  int rank_, size_;
  int64_t own_, sent_ = 0;
  at::Tensor packed_;    // what goes to the others, in rank order, then what stays here
  at::Tensor received_;  // the others' pieces, in rank order
  std::unique_ptr<Pending> pending_;
};

}  // namespace dmuon

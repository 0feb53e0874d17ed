// DDP's answers: whole weights on every rank, all the time; gradients are means over the ranks.
#pragma once
#include <optional>
#include <vector>

#include "engine/runtime_adapter.h"

namespace dmuon {

class DdpAdapter final : public RuntimeAdapter {
 public:
  DdpAdapter(int units, double ranks) : units_(units), ranks_(ranks) {}

  UnitDtypes& unit(int index) { return units_.at(index); }

  // Gradients are kept until the outermost one is left. Nests.
  void enter_no_sync() { ++no_sync_depth_; }
  void leave_no_sync() { --no_sync_depth_; }

  // Under torch's DistributedDataParallel, which decides when a forward begins.
  void set_forward_sync(bool on) { forward_sync_ = on; }

  Residency residency(int) const override { return Residency::resident; }
  bool synchronize(int) const override { return forward_sync_.value_or(no_sync_depth_ == 0); }
  double divisor(int) const override { return ranks_; }
  c10::ScalarType compute_dtype(int unit) const override { return units_[unit].compute_dtype; }
  c10::ScalarType reduce_dtype(int unit) const override { return units_[unit].reduce_dtype; }

 private:
  std::vector<UnitDtypes> units_;
  double ranks_;
  int no_sync_depth_ = 0;
  std::optional<bool> forward_sync_;
};

}  // namespace dmuon

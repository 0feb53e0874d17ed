// FSDP2's answers: per unit, what the public setters of FSDPModule and its MixedPrecisionPolicy
// say.
#pragma once
#include <vector>

#include "engine/runtime_adapter.h"

namespace dmuon {

struct Fsdp2Unit {
  bool reshard_after_forward = true;   // FSDPModule.set_reshard_after_forward
  bool requires_gradient_sync = true;  // FSDPModule.set_requires_gradient_sync
  double gradient_divide_factor = 1;   // FSDPModule.set_gradient_divide_factor; else the world size
  c10::ScalarType compute_dtype = c10::ScalarType::Float;
  c10::ScalarType reduce_dtype = c10::ScalarType::Float;
};

class Fsdp2Adapter final : public RuntimeAdapter {
 public:
  Fsdp2Adapter(int units, double divisor) : units_(units, {.gradient_divide_factor = divisor}) {}

  Fsdp2Unit& unit(int index) { return units_.at(index); }

  // dmuon.no_sync: holds for all units, whatever their own flag says. Nests.
  void enter_no_sync() { ++no_sync_depth_; }
  void leave_no_sync() { --no_sync_depth_; }

  Residency residency(int unit) const override;
  bool synchronize(int unit) const override;
  double divisor(int unit) const override { return units_[unit].gradient_divide_factor; }
  c10::ScalarType compute_dtype(int unit) const override { return units_[unit].compute_dtype; }
  c10::ScalarType reduce_dtype(int unit) const override { return units_[unit].reduce_dtype; }

 private:
  std::vector<Fsdp2Unit> units_;
  int no_sync_depth_ = 0;
};

}  // namespace dmuon

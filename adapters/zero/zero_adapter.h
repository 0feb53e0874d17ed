// ZeRO's answers: whole weights on every rank for stages 0 to 2, on the owner alone for stage 3.
// Whether a backward pass reduces is DeepSpeed's to say, and is asked once per pass.
#pragma once
#include <functional>
#include <utility>
#include <vector>

#include "engine/runtime_adapter.h"

namespace dmuon {

class ZeroAdapter final : public RuntimeAdapter {
 public:
  // The sum of the ranks' gradients is divided by `divisor`.
  ZeroAdapter(int units, Residency residency, double divisor)
      : units_(units), residency_(residency), divisor_(divisor) {}

  UnitDtypes& unit(int index) { return units_.at(index); }
  void set_divisor(double divisor) { divisor_ = divisor; }

  // Whether the pass that begins reduces; until it is set every one does. The same on every rank.
  void set_reduces(std::function<bool()> reduces) { reduces_ = std::move(reduces); }

  // Whether a pass since the last call has kept its gradients. The same on every rank.
  bool take_kept() { return std::exchange(kept_, false); }

  void begin_pass() override {
    synchronize_ = !reduces_ || reduces_();
    kept_ |= !synchronize_;
  }

  bool prefetches() const override { return residency_ == Residency::transient; }
  Residency residency(int) const override { return residency_; }
  bool synchronize(int) const override { return synchronize_; }
  double divisor(int) const override { return divisor_; }
  c10::ScalarType compute_dtype(int unit) const override { return units_[unit].compute_dtype; }
  c10::ScalarType reduce_dtype(int unit) const override { return units_[unit].reduce_dtype; }

 private:
  std::vector<UnitDtypes> units_;
  Residency residency_;
  double divisor_;
  std::function<bool()> reduces_;
  bool synchronize_ = true;
  bool kept_ = false;
};

}  // namespace dmuon

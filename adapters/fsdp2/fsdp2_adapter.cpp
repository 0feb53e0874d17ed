#include "adapters/fsdp2/fsdp2_adapter.h"

namespace dmuon {

Residency Fsdp2Adapter::residency(int unit) const {
  return units_[unit].reshard_after_forward ? Residency::transient
                                            : Residency::resident_after_forward;
}

bool Fsdp2Adapter::synchronize(int unit) const {
  return no_sync_depth_ == 0 && units_[unit].requires_gradient_sync;
}

}  // namespace dmuon

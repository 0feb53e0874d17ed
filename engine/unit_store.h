// The weights of one unit on this rank: where they lie, and when they are whole.
//
// Two buffers: `own` holds the segments that this rank owns and is always allocated; where the
// compute dtype is the master's, the masters are that memory. `others` holds the rest: allocated by
// `allocate`, freed by `release`. Used from the training thread; `publish` may run on a lane.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/autograd_hooks.h"
#include "engine/buffer.h"
#include "engine/plan.h"
#include "engine/transport.h"

namespace dmuon {

// One dedicated parameter in its unit.
struct Slot {
  int32_t matrix = -1;   // index into the plan
  int32_t segment = -1;  // index into UnitStore::segments()
  int64_t offset = 0;    // in the segment, in elements
  int64_t numel = 0;
  std::vector<int64_t> sizes, strides;  // of the parameter, contiguous
  bool owned = false;

  at::Tensor parameter;    // the object that module, autograd and optimizer see, all the time
  at::Tensor placeholder;  // what it shows between uses
  at::Tensor whole;        // what it shows in use

  // `parameter.grad` between passes is `shown_grad`: the reduced gradient on the owner, what
  // no_sync has accumulated elsewhere. Both are put aside here while a pass accumulates a new one.
  at::Tensor reduced;     // owner only: the mean over the ranks, float32
  at::Tensor local;       // not reduced yet
  at::Tensor shown_grad;  // which object we handed out; another one, or none, is the user's doing
  bool fired = false;
  std::optional<AccumulationHook> hook;
};

struct SegmentStore {
  int32_t owner = 0;
  int32_t first_slot = 0, slots = 0;
  int64_t numel = 0;
  bool owned = false;
  at::Tensor flat;    // 1-D, compute dtype; others' may be read while the unit is whole only
  at::Tensor master;  // owner only, 1-D
};

class UnitStore {
 public:
  // Nothing is allocated yet.
  UnitStore(const OwnershipPlan& plan, int unit, int rank);

  const std::string& name() const { return name_; }
  std::vector<Slot>& slots() { return slots_; }
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<SegmentStore>& segments() const { return segments_; }

  // Takes over a parameter: the owner copies its value into the master, then the parameter shows
  // the placeholder and whatever memory it had is let go. A parameter on the meta device is only
  // noted
  // (`adopted` stays false) and must be adopted again once it has a device.
  void adopt(int slot, const at::Tensor& parameter);
  bool adopted() const;

  // Writes a new value into the owner's master and buffer; nothing elsewhere.
  void set_value(int slot, const at::Tensor& value);
  at::Tensor master(int slot) const;  // owner only, in the parameter's sizes

  void prepare(at::ScalarType compute_dtype);  // before the first use; later calls do nothing
  bool prepared() const { return prepared_; }

  const std::vector<Broadcast>& allocate();  // what must be broadcast to make the unit whole
  void show_whole();
  void release();
  bool shown() const { return shown_; }

  void publish();  // copies masters into the owner's buffers, where they are not one memory
  bool publishes() const;

  // Throws ConfigError naming a parameter that no longer shows what we gave it: its `.data` was
  // swapped, or it was cast or moved after setup.
  void verify(const OwnershipPlan& plan) const;

 private:
  at::Tensor part_of_master(const Slot& slot) const;
  void lay_out(at::ScalarType dtype, const at::Device& device);
  void move_master(SegmentStore& segment);

  std::string name_;
  std::vector<Slot> slots_;
  std::vector<SegmentStore> segments_;
  FlatBuffer own_, others_;
  std::vector<Broadcast> parts_;
  bool prepared_ = false;
  bool shown_ = false;
};

}  // namespace dmuon

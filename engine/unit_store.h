// The weights of one unit on this rank: where they lie, and when they are whole.
//
// Two buffers: `kept` has the segments that this rank holds and is always allocated; where the
// compute dtype is the master's, the masters are that memory. `others` has the rest: allocated by
// `allocate`, freed by `release`. Used from the training thread; `refresh` may run on a lane.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "engine/buffer.h"
#include "engine/plan.h"
#include "engine/slot.h"
#include "engine/transport.h"

namespace dmuon {

// The unit's matrices of one owner. Each replica has a holder of it: the rank whose shard
// coordinate is the owner's. Holders keep the weights in compute dtype between uses, the owner the
// masters.
struct SegmentStore {
  int32_t holder = 0;   // shard coordinate of the owner
  int32_t replica = 0;  // replicate coordinate of the owner
  int32_t first_slot = 0, slots = 0;
  int64_t numel = 0;
  bool held = false;   // by this rank
  bool owned = false;  // by this rank's cell
  at::Tensor flat;  // 1-D, compute dtype; what is not held may be read while the unit is whole only
  at::Tensor master;  // owner only, 1-D
};

class UnitStore {
 public:
  // Nothing is allocated yet. `layouts`: per matrix of the plan, or empty where none is cut.
  UnitStore(const OwnershipPlan& plan, int unit, const Position& me,
            const std::vector<TpLayout>& layouts);

  const std::string& name() const { return name_; }
  std::vector<Slot>& slots() { return slots_; }
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<SegmentStore>& segments() const { return segments_; }

  // Takes over a parameter: the owner copies its value into the master, then the parameter shows
  // the placeholder and whatever memory it had is let go. A parameter on the meta device is only
  // noted (`adopted` stays false) and must be adopted again once it has a device. `inner` is the
  // parameter itself, or what it wraps.
  void adopt(int slot, const at::Tensor& parameter, const at::Tensor& inner,
             std::shared_ptr<TensorWrapper> wrapper);
  bool adopted() const;

  // Of float32 messages about the adopted unit. From any thread: parameters are shown and released
  // while lanes work, so their own options are the training thread's to read.
  at::TensorOptions float_options() const;

  // Writes a new value, this rank's part of it, into the owner's master and the holders' buffers;
  // nothing elsewhere.
  void set_value(int slot, const at::Tensor& value);
  at::Tensor master(int slot) const;  // owner only, in the parameter's sizes

  // Whether gradient and update of a cut matrix stay in its shards.
  void keep_in_shards(int slot, bool kept);

  void prepare(at::ScalarType compute_dtype);  // before the first use; later calls do nothing
  bool prepared() const { return prepared_; }

  const std::vector<Broadcast>& allocate();  // what must be broadcast to make the unit whole
  void show_whole();
  void release();
  bool shown() const { return shown_; }

  void refresh();  // copies masters into the owner's buffer, where they are not one memory
  bool refreshes() const;
  // What owners must broadcast over the replicate axis to the other holders.
  const std::vector<Broadcast>& replicated() const { return replicated_; }

  // Throws ConfigError naming a parameter that no longer shows what we gave it: its `.data` was
  // swapped, or it was cast or moved after setup.
  void verify(const OwnershipPlan& plan) const;

 private:
  void add_segment(const OwnershipPlan& plan, const Segment& segment, const Position& me,
                   const std::vector<TpLayout>& layouts);
  at::Tensor part_of_master(const Slot& slot) const;
  void list_parts();
  void lay_out(at::ScalarType dtype, const at::Device& device);
  void move_master(SegmentStore& segment);

  std::string name_;
  std::vector<Slot> slots_;
  std::vector<SegmentStore> segments_;
  FlatBuffer kept_, others_;
  std::vector<Broadcast> parts_, replicated_;
  bool packed_ = true;
  bool prepared_ = false;
  bool shown_ = false;
};

}  // namespace dmuon

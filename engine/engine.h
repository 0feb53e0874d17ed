// The life of every unit under real autograd: materialise, release, reduce to the owner, and, with
// the optimizer, update and publish. Written once for all runtimes.
//
// A boundary is a module whose call the runtime reports (`enter`, `leave`); it uses one unit, or
// more where a tied weight belongs to another one. Hooks may run in nested passes (checkpointing).
//
// Thread: everything is called from the training thread, or from the thread that runs the backward
// pass while the training thread waits for it. Collective: ranks must enter the same boundaries in
// the same order and run the same backward passes.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/flight_ring.h"
#include "engine/lane.h"
#include "engine/lifecycle.h"
#include "engine/plan.h"
#include "engine/reduction.h"
#include "engine/runtime_adapter.h"
#include "engine/step_clock.h"
#include "engine/tp_exchange.h"
#include "engine/transport.h"
#include "engine/unit_store.h"

namespace dmuon {

// Each purpose has a process group of its own, and each group is issued to by one thread in one
// order: on the host fetches, reductions and scatters of updates by the training thread, the second
// axis' reductions, publishes and gathers by their lanes; on an accelerator all by their lanes.
struct Channels {
  std::unique_ptr<Transport> materialise, reduce;        // shard axis
  std::unique_ptr<Transport> replicate_reduce, publish;  // replicate axis; null where its size is 1
  std::unique_ptr<Transport> tp_gather, tp_scatter;      // TP axis; null where its size is 1
  std::unique_ptr<Transport> control;  // the whole job: agreements and norms, on CPU tensors
  // Engines that share a group share its lane: one thread issues to it, in the program's order.
  std::shared_ptr<Lane> materialise_lane, reduce_lane, publish_lane, tp_lane;
};

struct EngineConfig {
  OwnershipPlan plan;
  std::vector<std::vector<int32_t>> boundaries;  // units of each boundary
  std::vector<bool> encloses;                    // per boundary: whether it holds other boundaries
  std::vector<int32_t> order;  // all units, the same on every rank: steps go through it backwards
  std::shared_ptr<RuntimeAdapter> adapter;
  std::shared_ptr<FlightRing> ring;  // may be null
  Position position;
  std::vector<TpLayout> layouts;  // per matrix, or empty: none is cut
  bool share_gather_staging = false, share_scatter_staging = false;
};

struct Counters {
  int64_t steps = 0;
  int64_t steps_without_gradient = 0;
  int64_t materialisations = 0;  // of a unit
  int64_t prefetches = 0;        // of them, issued while another unit computed
  int64_t reductions = 0;
  int64_t sent_bytes_last_step = 0;  // this rank's, since the step before
  int64_t aborted_passes = 0;        // backward passes that ended with an exception
  int64_t reduce_wait_us = 0;        // the training thread waited for reductions this long
  int64_t tp_gather_us = 0;          // gathers of gradients have taken this long,
  int64_t tp_wait_us = 0;            // of which the training thread has waited
  int64_t tp_regathers = 0;          // steps whose gradients had changed since they were gathered
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(EngineConfig config, Channels channels);
  ~Engine();

  const OwnershipPlan& plan() const { return config_.plan; }
  int rank() const { return channels_.control->rank(); }
  const Counters& counters() const { return counters_; }
  FlightRing* ring() const { return config_.ring.get(); }
  StepClock& clock() { return clock_; }
  const StepClock& clock() const { return clock_; }
  RuntimeAdapter& adapter() { return *config_.adapter; }
  Transport& control() { return *channels_.control; }
  UnitState state(int unit) const { return units_[unit].state; }
  UnitStore& store(int unit) { return units_[unit].store; }

  // Where a matrix lies.
  struct Place {
    int32_t unit = 0, slot = 0;
  };
  Place place(int matrix) const { return places_[matrix]; }
  Slot& slot(int matrix);
  const Slot& slot(int matrix) const;
  void adopt(int matrix, const at::Tensor& parameter) { adopt(matrix, parameter, parameter, {}); }
  void adopt(int matrix, const at::Tensor& parameter, const at::Tensor& inner,
             std::shared_ptr<TensorWrapper> wrapper);
  // A new value for a matrix, on every rank its part; the owner's counts.
  void set_value(int matrix, const at::Tensor& value);
  // On a rank that takes part in setting a value and has none to give: the owner has it already.
  void mark_changed(int matrix);

  // Makes resident units whole, for good; their initial values are the owners'. Collective.
  void show_residents();
  // Owners' values to all copies that lag behind. Collective; each use of a unit does it for
  // itself.
  void spread_values();

  // Hooks.
  void enter(int boundary);
  void leave(int boundary, const std::vector<at::Tensor>& outputs);

  // Lets reductions in flight end and hands out their results. Idempotent, legal at any point.
  void wait_reductions();
  // Reduces what passes that did not synchronise have accumulated, on any rank. Collective; outside
  // of a pass.
  void reduce_accumulated();

  // Ends a backward pass that an exception has left unfinished: buffers freed, units idle, and no
  // gradient in the units that the pass had reached.
  void reset();

  // For the optimizer. `begin_step` waits for everything in flight; between the two no unit is
  // whole.
  void begin_step();
  // The owners have changed the unit's weights, this rank's own ones if `owned`; or do when `last`
  // has run, on the publish lane.
  void publish(int unit, bool owned, std::function<void()> last = {});
  // Masters may have been written by hand: all copies of all weights are made anew. Collective.
  void publish_all();
  void end_step(bool updated);
  void wait_publishes();
  bool has_local_gradients() const;  // accumulated under no_sync, never reduced
  const std::vector<int32_t>& order() const { return config_.order; }
  int64_t take_sequence_hash();  // of the collectives since the last call
  // By what norms gradients were clipped, and to what: ranks compare it with the next step's word.
  void note_clipping(int64_t settings) { note(clipping_, settings); }
  int64_t take_clipping_hash() { return std::exchange(clipping_, 0); }

  // Tensor parallelism. All are for the optimizer.
  Transport* tp() { return channels_.tp_scatter.get(); }
  Staging& scatter_staging() { return scatter_staging_; }
  // Elements that this rank stages for one pass and step: the largest unit's, and all units'.
  struct StagingUse {
    bool shared = false;
    int64_t largest = 0, total = 0;
  };
  StagingUse gather_use() const;
  StagingUse scatter_use() const;
  // The gradients and updates of these matrices, and of no others, stay in shards from now on.
  void keep_in_shards(const std::vector<int32_t>& matrices);
  bool gathers_are_current() const;
  void gather_again();

 private:
  struct UnitRuntime {
    UnitRuntime(UnitStore s, int i) : store(std::move(s)), index(i) {}
    UnitStore store;
    int index;  // into units_
    UnitState state = UnitState::idle;
    int depth = 0;          // calls of its boundaries in progress
    int64_t epoch = 0;      // steps that have changed its weights
    bool armed = false;     // a backward pass has reached it
    int pending = 0;        // trainable slots that this pass has not reached yet
    int64_t last_left = 0;  // order of the forwards
    int position = -1;      // in the pass
    bool touched = false;   // this rank's part of the pass reaches it
    bool reduces = false;   // trainable, and this pass ends an accumulation
    bool issued = false;
    bool refired = false;  // a gradient came after the reduction was issued
    bool keep = false;     // no output to hook: stays whole until the backward pass ends
    bool outer = false;    // its boundary holds others: its operations come before and after theirs
    std::unique_ptr<Reduction> reduction;
    bool finish_here = false;        // no lane finishes the reduction: whoever collects it does
    std::shared_ptr<void> reducing;  // until then, for the clock
    bool stale = true;  // values set: other replicas and TP ranks may have others than the owner
    std::vector<int> gathering;      // slots whose gradient of this pass is being gathered
    std::vector<at::Tensor> wholes;  // parallel: what has come of it
    int64_t gather_us = 0;
    std::unique_ptr<Pending> fetching;  // host: issued ahead of its use
    bool fetch_issued = false;          // and not yet finished
    std::shared_ptr<void> arriving;     // ahead of its use, for the clock
    int next = -1;                      // the unit that came after it in the last forward
    Event reduced, gathered, published, fetched;
  };

  void advance(UnitRuntime& unit, UnitCall call);
  static void require_adopted(const UnitRuntime& unit);
  void spread(UnitRuntime& unit);
  void finish_lanes();
  void wait_published(const UnitRuntime& unit);
  Phase fetch_phase() const { return in_pass_ ? Phase::backward_fetch : Phase::forward_fetch; }
  void materialise(UnitRuntime& unit);
  void start_fetch(UnitRuntime& unit);
  void finish_fetch(UnitRuntime& unit);
  void prefetch(int unit);
  void drop_prefetch();
  void follow_forward(UnitRuntime& unit);
  void end_forward();
  void release(UnitRuntime& unit);
  bool resident(const UnitRuntime& unit) const;
  void watch(UnitRuntime& unit);
  void forget_cleared(UnitRuntime& unit);
  bool trainable(const UnitRuntime& unit) const;
  static bool has_local_gradient(const UnitRuntime& unit);
  static void note(int64_t& sequence, int64_t event);

  void pre_backward(int boundary, const std::vector<int64_t>& epochs);
  void begin_pass();
  std::vector<bool> touched_here() const;
  std::vector<bool> touched_anywhere(const std::vector<bool>& here);
  void join_pass(UnitRuntime& unit);
  void fetch(UnitRuntime& unit);
  void fetch_next();
  void arm(UnitRuntime& unit);
  void accumulated(int unit, int slot);
  void release_finished(int boundary);
  void issue_ready();
  void issue(UnitRuntime& unit);
  static std::vector<at::Tensor> take_local(UnitRuntime& unit);
  void start(UnitRuntime& unit);
  void start_gather(UnitRuntime& unit);
  void equalise(UnitRuntime& unit);
  void submit_publish(UnitRuntime& unit, bool owned, std::function<void()> last);
  void add_reduced(UnitRuntime& unit);
  void arm_late(UnitRuntime& unit, int slot);
  static void keep_local(Slot& slot);
  void end_pass();
  void collect(UnitRuntime& unit);
  void finish(UnitRuntime& unit);
  void hand_out(UnitRuntime& unit);
  static void drop_gradients(UnitRuntime& unit);

  EngineConfig config_;
  StepClock clock_;
  Channels channels_;
  std::vector<UnitRuntime> units_;
  std::vector<Place> places_;
  Counters counters_;
  Staging gather_staging_, scatter_staging_;

  bool in_pass_ = false;            // between the first hook of a backward pass and its end
  std::weak_ptr<void> pass_alive_;  // autograd holds it for as long as the pass runs
  // The units that this pass reaches on any rank, the last forward first: the same on every rank.
  // Weights are fetched and gradients reduced in this order.
  std::vector<int32_t> pass_order_;
  size_t fetched_ = 0, reduced_ = 0;                 // how many of them
  std::vector<std::shared_ptr<HookedNodes>> nodes_;  // per boundary
  int64_t forwards_ = 0, passes_ = 0;
  int last_entered_ = -1, prefetched_ = -1;  // units of the forward in progress
  int64_t fetch_sequence_ = 0, reduce_sequence_ = 0, clipping_ = 0;
  int64_t bytes_at_step_ = 0;
};

}  // namespace dmuon

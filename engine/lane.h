// Ordered queues of work beside the caller.
//
// On an accelerator a lane is a stream: work runs at once on the calling thread and only enqueues.
// On the host a lane is a strand on a pool shared by all lanes: work runs later, in order, one at a
// time, beside the caller. One interface for both.
//
// Work runs under one thread-local state, whichever thread it lands on (engine/task_scope.h): no
// autograd, no inference mode, no autocast, no mode of the caller, one intra-op thread on the host.
// What it may not do is wait for later work of its own lane: that raises ConfigError.
//
// Lanes do not survive a fork: a child process makes its own, and may destroy inherited ones.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10 {
struct Device;
}

namespace dmuon {

// A point in a lane's work, and the failure that ended it, if any. Copies share it. Safe to destroy
// at any time. Default-constructed: already reached.
class Event {
 public:
  class State;  // one per kind of lane

  Event() = default;
  explicit Event(std::shared_ptr<State> state);

  // Reached, or failed? Never blocks, never throws.
  bool query() const;

  // What the caller does next comes after this point. On the host the calling thread blocks, or
  // runs the lane's work itself where the lane is idle; on an accelerator its current stream
  // blocks. Rethrows the failure.
  void wait() const;

  // Blocks the host. Rethrows the failure.
  void synchronize() const;

  // For lanes.
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

// Work is submitted from any thread; `submit` never blocks on the host lane.
//
// A task that throws poisons its lane: later tasks of the lane do not run, their events carry the
// first failure. A task whose `after` failed does not run and fails the same way, and so poisons
// its lane too. `reset` clears it. What a task holds is released before its event is reached.
class Lane {
 public:
  virtual ~Lane() = default;

  // Runs `work` after everything submitted before, after `after`, and after what the calling thread
  // did before: on an accelerator, what its current stream holds by now. An event of another kind
  // of lane holds the thread that runs the work, so prefer events of the same kind.
  virtual Event submit(std::function<void()> work, std::vector<Event> after = {}) = 0;

  // As submit and wait. On the host the work runs on the calling thread, which must be the only one
  // that uses the lane, under its own thread-local state: two context switches less.
  virtual void run(const std::function<void()>& work, const std::vector<Event>& after = {});

  // The end of what has been submitted so far.
  virtual Event record() = 0;

  // Forgets a failure. Call it when nothing is in flight.
  virtual void reset() = 0;
};

// host: strands on one shared pool. inline_: `submit` runs the work before it returns, on the
// calling thread, also without an accelerator (for `process_group_policy="shared"` and debugging).
enum class LaneKind { host, inline_, device };

// Destroying a lane waits for the task in progress and drops the others (their events fail). The
// last host lane to go ends the pool's threads. No task may destroy its own lane.
std::unique_ptr<Lane> make_host_lane(std::string name);
std::unique_ptr<Lane> make_inline_lane(std::string name);
// Streams through c10::impl::VirtualGuardImpl. ConfigError where `device` has no streams.
std::unique_ptr<Lane> make_device_lane(std::string name, const c10::Device& device);

}  // namespace dmuon

// Ordered queues of work beside the caller.
//
// On an accelerator a lane is a stream: work runs at once on the calling thread and only enqueues.
// On the host a lane is a strand on a pool shared by all lanes: work runs later, in order, one at a
// time, beside the caller. One interface for both.
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

  // What the caller does next comes after this point. On the host the calling thread blocks; on an
  // accelerator its current stream does. Rethrows the failure.
  void wait() const;

  // Blocks the host. Rethrows the failure.
  void synchronize() const;

 private:
  friend class HostLane;
  std::shared_ptr<State> state_;
};

// Work is submitted from any thread; `submit` never blocks on the host lane.
//
// A task that throws poisons its lane: later tasks of the lane do not run, their events carry the
// first failure. A task whose `after` failed does not run and fails the same way. `reset` clears it.
class Lane {
 public:
  virtual ~Lane() = default;

  // Runs `work` after everything submitted before, and after `after`.
  virtual Event submit(std::function<void()> work, std::vector<Event> after = {}) = 0;

  // The end of what has been submitted so far.
  virtual Event record() = 0;

  // Forgets a failure. Call it when nothing is in flight.
  virtual void reset() = 0;
};

// host: strands on one shared pool. inline_: `submit` runs the work before it returns, on the
// calling thread, also without an accelerator (for `process_group_policy="shared"` and debugging).
enum class LaneKind { host, inline_, device };

// Destroying a lane waits for the task in progress and drops the others (their events fail).
std::unique_ptr<Lane> make_host_lane(std::string name);
std::unique_ptr<Lane> make_inline_lane(std::string name);
// Streams through c10::impl::VirtualGuardImpl; `device` is an accelerator.
std::unique_ptr<Lane> make_device_lane(std::string name, const c10::Device& device);

}  // namespace dmuon

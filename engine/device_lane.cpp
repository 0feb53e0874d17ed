#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <functional>
#include <mutex>
#include <utility>

#include "engine/error.h"
#include "engine/event_state.h"
#include "engine/task_scope.h"

namespace dmuon {
namespace {

using c10::impl::VirtualGuardImpl;

class DeviceState final : public Event::State {
 public:
  explicit DeviceState(const c10::Stream& stream) : event_(stream.device_type()) {
    event_.record(stream);
  }

  bool query() const noexcept override {
    try {
      return event_.query();
    } catch (...) {
      return true;  // a device that failed reaches nothing any more; wait() reports it
    }
  }

  void wait() override {
    event_.block(VirtualGuardImpl(event_.device_type()).getStream(event_.device()));
  }

  void synchronize() override { event_.synchronize(); }

 private:
  c10::Event event_;
};

c10::Stream new_stream(const std::string& name, const c10::Device& device) {
  if (device.is_cpu() || device.is_meta() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    throw ConfigError(message("lane '", name, "' was asked for on device '", device.str(),
                              "', which has no streams. Use a host lane there."));
  }
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

class DeviceLane final : public Lane {
 public:
  DeviceLane(const std::string& name, const c10::Device& device)
      : stream_(new_stream(name, device)), guard_(device.type()) {}

  ~DeviceLane() override {
    try {
      guard_.synchronizeStream(stream_);
    } catch (...) {  // whoever waits on an event meets the device's failure
    }
  }

  Event submit(std::function<void()> work, std::vector<Event> after) override {
    std::lock_guard lock(mutex_);
    try {
      if (failure_) std::rethrow_exception(failure_);
      enqueue(work, after);
    } catch (...) {
      failure_ = std::current_exception();
    }
    return end();
  }

  void run(const std::function<void()>& work, const std::vector<Event>& after) override {
    submit(work, after).wait();
  }

  Event record() override {
    std::lock_guard lock(mutex_);
    return end();
  }

  void reset() override {
    std::lock_guard lock(mutex_);
    failure_ = nullptr;
  }

 private:
  void enqueue(const std::function<void()>& work, const std::vector<Event>& after) {
    c10::Event caller(stream_.device_type());
    caller.record(guard_.getStream(stream_.device()));
    caller.block(stream_);
    // Under the guard an event's wait() holds this lane's stream, or the host for a host event.
    c10::StreamGuard on_stream(stream_);
    for (const Event& event : after) event.wait();
    TaskScope scope;
    work();
  }

  Event end() const {
    if (failure_) return Event(std::make_shared<EndedState>(failure_));
    return Event(std::make_shared<DeviceState>(stream_));
  }

  const c10::Stream stream_;
  const VirtualGuardImpl guard_;
  std::recursive_mutex mutex_;  // a task may submit to its own lane
  std::exception_ptr failure_;
};

}  // namespace

std::unique_ptr<Lane> make_device_lane(std::string name, const c10::Device& device) {
  return std::make_unique<DeviceLane>(name, device);
}

}  // namespace dmuon

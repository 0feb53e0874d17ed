#include <functional>
#include <mutex>
#include <utility>

#include "engine/event_state.h"
#include "engine/task_scope.h"

namespace dmuon {
namespace {

class InlineLane final : public Lane {
 public:
  Event submit(std::function<void()> work, std::vector<Event> after) override {
    std::lock_guard lock(mutex_);
    try {
      if (failure_) std::rethrow_exception(failure_);
      for (const Event& event : after) event.wait();
      TaskScope scope;
      work();
    } catch (...) {
      failure_ = std::current_exception();
    }
    return end();
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
  Event end() const { return failure_ ? Event(std::make_shared<EndedState>(failure_)) : Event(); }

  std::recursive_mutex mutex_;  // a task may submit to its own lane
  std::exception_ptr failure_;
};

}  // namespace

std::unique_ptr<Lane> make_inline_lane(std::string) { return std::make_unique<InlineLane>(); }

}  // namespace dmuon

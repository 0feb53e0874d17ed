// What an Event points to; included by lanes only.
#pragma once
#include <exception>
#include <utility>

#include "engine/lane.h"

namespace dmuon {

class Event::State {
 public:
  virtual ~State() = default;
  virtual bool query() const noexcept = 0;
  virtual void wait() = 0;
  virtual void synchronize() = 0;
};

// Ended before its event was handed out: nothing to wait for, at most a failure to rethrow.
class EndedState final : public Event::State {
 public:
  explicit EndedState(std::exception_ptr failure) : failure_(std::move(failure)) {}
  bool query() const noexcept override { return true; }
  void wait() override {
    if (failure_) std::rethrow_exception(failure_);
  }
  void synchronize() override { wait(); }

 private:
  const std::exception_ptr failure_;
};

}  // namespace dmuon

#include <functional>
#include <utility>

#include "engine/event_state.h"

namespace dmuon {

Event::Event(std::shared_ptr<State> state) : state_(std::move(state)) {}

bool Event::query() const { return !state_ || state_->query(); }

void Event::wait() const {
  if (state_) state_->wait();
}

void Event::synchronize() const {
  if (state_) state_->synchronize();
}

void Lane::run(const std::function<void()>& work, const std::vector<Event>& after) {
  record().wait();
  for (const Event& event : after) event.wait();
  work();
}

}  // namespace dmuon

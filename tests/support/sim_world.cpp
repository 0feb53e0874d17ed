#include "tests/support/sim_world.h"

#include <exception>
#include <thread>
#include <utility>

#include "engine/task_scope.h"

namespace dmuon::testing {
namespace {

// The ranks that say the same, for a message: "ranks 0, 2".
std::string ranks_that_say(const Parts& parts, const std::string& what) {
  std::string ranks;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].what == what) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return (ranks.find(',') == std::string::npos ? "rank " : "ranks ") + ranks;
}

std::string disagreement(const Parts& parts) {
  const auto other =
      std::ranges::find_if(parts, [&](const Part& part) { return part.what != parts[0].what; });
  if (other == parts.end()) return "";
  return message("ranks disagree: ", ranks_that_say(parts, parts[0].what), " calls ", parts[0].what,
                 "; ", ranks_that_say(parts, other->what), " calls ", other->what);
}

std::string uneven_exchange(const Parts& parts) {
  const int size = static_cast<int>(parts.size());
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size && !parts[from].sends.empty(); ++to) {
      if (parts[from].sends[to] == parts[to].receives[from]) continue;
      return message("ranks disagree: in ", parts[from].what, " rank ", from, " sends ",
                     parts[from].sends[to], " elements to rank ", to, ", which receives ",
                     parts[to].receives[from]);
    }
  }
  return "";
}

}  // namespace

std::chrono::microseconds SimWorld::State::delay_at(const Place& place) {
  const auto& [group, rank, index] = place;
  std::chrono::microseconds delay(random ? (*random)() % 200 : 0);
  for (int late : {-1, rank}) {
    const auto found = delays.find({group, late, index});
    if (found != delays.end()) delay += found->second;
  }
  return delay;
}

// Late, if so asked; or not at all.
void SimWorld::State::arrive(Lock& lock, const Seat& seat) {
  Group& group = this->group(seat);
  const Place place{seat.name, seat.world_rank, group.indices[seat.rank]++};
  const auto delay = delay_at(place);
  if (delay.count() > 0) {
    lock.unlock();
    std::this_thread::sleep_for(delay);
    lock.lock();
  }
  if (const auto failing = failures.find(place); failing != failures.end()) {
    group.fail(message("group '", seat.group, "': rank ", seat.rank, " failed: ", failing->second),
               true);
    throw RuntimeFailure(failing->second);
  }
  group.throw_if_failed(group.round);
}

void SimWorld::State::finish_round(const std::string& name, Group& group, const Combine& combine) {
  std::string wrong = disagreement(group.parts);
  if (wrong.empty()) wrong = uneven_exchange(group.parts);
  if (wrong.empty()) {
    log.push_back({name, group.round, group.parts[0].what});
    TaskScope scope;
    combine(group.parts);
  } else {
    group.fail(message("operation ", group.round, " of group '", name, "': ", wrong), false);
  }
  std::ranges::fill(group.parts, Part());
  group.arrived.assign(group.arrived.size(), false);
  ++group.round;
  group.changed.notify_all();
}

void SimWorld::State::meet(const Seat& seat, Part part, const Combine& combine) {
  Lock lock(mutex);
  arrive(lock, seat);
  Group& group = this->group(seat);
  group.parts[seat.rank] = std::move(part);
  group.arrived[seat.rank] = true;
  const int64_t round = group.round;
  for (int other = 0; other < seat.size; ++other) {
    if (!group.left[other]) continue;
    group.fail(message("group '", seat.group, "': rank ", other, " has left"), true);
  }
  if (group.complete()) finish_round(seat.group, group, combine);
  group.changed.wait(lock, [&] { return group.round != round || !group.failure.empty(); });
  group.throw_if_failed(round);
}

void SimWorld::State::abort(const Seat& seat, const std::string& reason) {
  Lock lock(mutex);
  group(seat).fail(message("group '", seat.group, "': rank ", seat.rank, " aborted: ", reason),
                   true);
}

void SimWorld::State::join(const Seat& seat) {
  Lock lock(mutex);
  group(seat).left[seat.rank] = false;
}

void SimWorld::State::leave(const Seat& seat) {
  Lock lock(mutex);
  Group& group = this->group(seat);
  group.left[seat.rank] = true;
  if (!group.anyone_waits()) return;
  group.fail(message("group '", seat.group, "': rank ", seat.rank, " has left"), true);
}

SimWorld::SimWorld(int size) : state_(std::make_shared<State>(size)) {}
SimWorld::~SimWorld() = default;

int SimWorld::size() const { return state_->size; }

void SimWorld::delay(const std::string& group, int64_t index, std::chrono::microseconds by,
                     int rank) {
  Lock lock(state_->mutex);
  state_->delays[{group, rank, index}] += by;
}

void SimWorld::fail(int rank, int64_t nth, const std::string& message, const std::string& group) {
  Lock lock(state_->mutex);
  state_->failures[{group, rank, nth}] = message;
}

void SimWorld::reorder(uint64_t seed) {
  Lock lock(state_->mutex);
  state_->random.emplace(seed);
}

std::vector<SimOperation> SimWorld::log() const {
  Lock lock(state_->mutex);
  return state_->log;
}

void run_ranks(int size, const std::function<void(int rank)>& body) {
  std::mutex mutex;
  std::exception_ptr failure, echo;  // the first of each
  const auto keep = [&](std::exception_ptr& first) {
    std::lock_guard lock(mutex);
    if (!first) first = std::current_exception();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const PeerFailure&) {
        keep(echo);
      } catch (...) {
        keep(failure);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  if (echo) std::rethrow_exception(echo);
}

}  // namespace dmuon::testing

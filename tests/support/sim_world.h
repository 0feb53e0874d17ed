// What a SimWorld is made of; for sim_*.cpp only.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <tuple>

#include "tests/support/sim_transport.h"

namespace dmuon::testing {

using Lock = std::unique_lock<std::mutex>;
using Place = std::tuple<std::string, int, int64_t>;  // name, rank of the world, index

// A rank of the world in one group.
struct Seat {
  std::string name, group;  // the axis; and the group, which no other has
  int size = 0, rank = 0;   // of the group
  int world_rank = 0;
};

// What one rank brings to an operation.
struct Part {
  std::string what;
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> sends, receives;  // exchange only
};
using Parts = std::vector<Part>;
using Combine = std::function<void(Parts&)>;

// The meeting place of one group. The last rank to arrive checks, and works on everybody's tensors.
struct Group {
  explicit Group(int size) : parts(size), arrived(size), left(size), indices(size) {}

  std::condition_variable changed;
  Parts parts;
  std::vector<bool> arrived, left;
  std::vector<int64_t> indices;  // of each rank's next operation
  int64_t round = 0;

  // For good, and for all ranks that have not left `failed_round` behind.
  std::string failure;
  int64_t failed_round = 0;
  bool freed = false;  // the failure is another rank's

  void fail(const std::string& reason, bool frees) {
    if (failure.empty()) {
      failure = reason;
      failed_round = round;
      freed = frees;
    }
    changed.notify_all();
  }

  void throw_if_failed(int64_t at_round) const {
    if (failure.empty() || at_round < failed_round) return;
    if (freed) throw PeerFailure(failure);
    throw RuntimeFailure(failure);
  }

  bool anyone_waits() const { return std::ranges::count(arrived, true) > 0; }
  bool complete() const { return std::ranges::count(arrived, false) == 0; }
};

struct SimWorld::State {
  explicit State(int size) : size(size) {}

  Group& group(const Seat& seat) { return groups.try_emplace(seat.group, seat.size).first->second; }

  // Blocks until all ranks of the group have brought their part and `combine` has worked on them.
  void meet(const Seat& seat, Part part, const Combine& combine);
  void abort(const Seat& seat, const std::string& reason);
  void join(const Seat& seat);
  void leave(const Seat& seat);

  const int size;
  std::mutex mutex;  // of everything here
  std::map<std::string, Group> groups;
  std::map<Place, std::chrono::microseconds> delays;
  std::map<Place, std::string> failures;
  std::optional<std::mt19937_64> random;
  std::vector<SimOperation> log;

 private:
  std::chrono::microseconds delay_at(const Place& place);
  void arrive(Lock& lock, const Seat& seat);
  void finish_round(const std::string& name, Group& group, const Combine& combine);
};

}  // namespace dmuon::testing

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
using Place = std::tuple<std::string, int, int64_t>;  // group, rank, index

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

  Group& group(const std::string& name) { return groups.try_emplace(name, size).first->second; }

  // Blocks until all ranks of the group have brought their part and `combine` has worked on them.
  void meet(const std::string& name, int rank, Part part, const Combine& combine);
  void abort(const std::string& name, int rank, const std::string& reason);
  void join(const std::string& name, int rank);
  void leave(const std::string& name, int rank);

  const int size;
  std::mutex mutex;  // of everything here
  std::map<std::string, Group> groups;
  std::map<Place, std::chrono::microseconds> delays;
  std::map<Place, std::string> failures;
  std::optional<std::mt19937_64> random;
  std::vector<SimOperation> log;

 private:
  std::chrono::microseconds delay_at(const Place& place);
  void arrive(Lock& lock, const std::string& name, int rank);
  void finish_round(const std::string& name, Group& group, const Combine& combine);
};

}  // namespace dmuon::testing

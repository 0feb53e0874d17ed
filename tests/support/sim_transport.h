// Many ranks as threads of one process, without c10d: a Transport that can delay, reorder and fail
// operations, and that checks what no real backend checks: that all ranks agree on each operation.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/flight_ring.h"
#include "engine/transport.h"

namespace dmuon::testing {

// Thrown on a rank that was waiting for one that failed, left or aborted.
struct PeerFailure : RuntimeFailure {
  using RuntimeFailure::RuntimeFailure;
};

// Some ranks of the world, in the order of their group ranks; all of them where none is named. The
// groups of one axis share a name.
struct SimGroup {
  std::string name = "main";
  std::vector<int> members;
  Channel channel = Channel::control;  // what the ring is to call its operations
};

struct SimOperation {
  std::string group;  // its name, and its members where they are not all ranks
  int64_t index = 0;  // within the group
  std::string what;   // operation, unit, roots, sizes: the same on every rank
};

// Ranks that disagree on the n-th operation of a group all throw RuntimeFailure naming both sides.
// A rank whose transport is destroyed frees those that wait for it (they throw PeerFailure), and so
// does abort(). Thread-safe. Set delays and failures before the ranks run.
class SimWorld {
 public:
  explicit SimWorld(int size);
  ~SimWorld();

  int size() const;

  // The transport of one rank of the world in one group. Groups come into being when first named.
  // start_exchange runs beside its caller, and what is received is NaN until it has.
  std::unique_ptr<Transport> transport(int rank, const SimGroup& group, FlightRing* ring = nullptr);
  std::unique_ptr<Transport> transport(int rank, const std::string& name = "main",
                                       FlightRing* ring = nullptr) {
    return transport(rank, SimGroup{name}, ring);
  }

  // In what follows ranks are the world's, and an operation is the nth of that rank in its group of
  // that name.
  // Every rank arrives late at that operation; or only `rank`.
  void delay(const std::string& group, int64_t index, std::chrono::microseconds by, int rank = -1);

  // The rank throws RuntimeFailure(message) instead of taking part in its nth operation.
  void fail(int rank, int64_t nth, const std::string& message, const std::string& group = "main");

  // Small random delays before every operation, from this seed: interleavings differ.
  void reorder(uint64_t seed);

  // What has been carried out so far, by any group, in the order of completion.
  std::vector<SimOperation> log() const;

  struct State;

 private:
  const std::shared_ptr<State> state_;
};

// Runs `body` once per rank, each on its own thread, and rethrows the first failure that is not
// only the echo of another rank's. Transports made by `body` free the other ranks as they go.
void run_ranks(int size, const std::function<void(int rank)>& body);

}  // namespace dmuon::testing

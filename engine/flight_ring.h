// The last operations of this process: what was on the wire, and what had finished, when it failed.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace dmuon {

enum class Op : uint8_t { broadcast, exchange, all_reduce, all_gather };
const char* to_string(Op op);
enum class OpState : uint8_t { issued, done, failed };

// What it was for: each is one axis of the mesh and one direction on it, and a process group of its
// own.
enum class Channel : uint8_t {
  materialise,       // shard axis: weights from their holders
  reduce,            // shard axis: gradients to their holders
  replicate_reduce,  // replicate axis: gradients from the holders to the owner
  publish,           // replicate axis: updates from the owner to the holders
  tp_gather,         // TP axis: gradients to the TP owner
  tp_scatter,        // TP axis: updates from the TP owner
  control            // the whole job: agreements, norms, setup
};
inline constexpr int kChannels = 7;
const char* to_string(Channel channel);

struct FlightRecord {
  int64_t sequence = 0;  // since construction
  int64_t step = 0;
  Op op{};
  Channel channel{};
  OpState state{};
  std::string unit;   // or what else it was for: "agreement", "setup"
  int32_t root = -1;  // broadcast only
  int64_t sent_bytes =
      0;                // this rank's share; summed over ranks it is the traffic of the operation
  double start_us = 0;  // since construction
  double duration_us = 0;
};

// Thread-safe. Holds the last `capacity` records; totals cover everything ever recorded, and cost
// one number per unit. Memory is fixed once every unit has been seen.
class FlightRing {
 public:
  explicit FlightRing(size_t capacity = 2048);

  // The sequence number, for end(). Ending a record that has left the ring does nothing.
  int64_t begin(Op op, std::string unit, int32_t root, int64_t sent_bytes,
                Channel channel = Channel::control);
  void end(int64_t sequence, OpState state);
  void set_step(int64_t step);

  std::vector<FlightRecord> records() const;  // oldest first
  int64_t total_operations() const;
  int64_t total_sent_bytes(const std::string& unit_prefix = "") const;
  int64_t total_sent_bytes(Channel channel) const;
  // One line per record, for people: the newest `last` of them, oldest first.
  std::string dump(size_t last = 2048) const;

 private:
  double now_us() const;

  const std::chrono::steady_clock::time_point born_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::vector<FlightRecord> ring_;
  const size_t capacity_;
  std::map<std::string, int64_t> sent_by_unit_;
  std::array<int64_t, kChannels> sent_by_channel_{};
  int64_t next_ = 0;
  int64_t step_ = 0;
};

}  // namespace dmuon

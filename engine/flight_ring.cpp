#include "engine/flight_ring.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <utility>

#include "engine/error.h"

namespace dmuon {
const char* to_string(Op op) {
  switch (op) {
    case Op::broadcast:
      return "broadcast";
    case Op::exchange:
      return "exchange";
    case Op::all_reduce:
      return "all_reduce";
    case Op::all_gather:
      return "all_gather";
  }
  return "?";
}

const char* to_string(Channel channel) {
  static constexpr std::array<const char*, kChannels> kNames{
      "materialise", "reduce", "replicate_reduce", "publish", "tp_gather", "tp_scatter", "control"};
  return kNames[static_cast<size_t>(channel)];
}

namespace {

const char* name(OpState state) {
  switch (state) {
    case OpState::issued:
      return "issued";
    case OpState::done:
      return "done";
    case OpState::failed:
      return "failed";
  }
  return "?";
}

std::string line(const FlightRecord& record) {
  std::ostringstream out;
  out << '#' << record.sequence << " step " << record.step << ' ' << to_string(record.op) << " '"
      << record.unit << '\'';
  if (record.channel != Channel::control) out << " (" << to_string(record.channel) << ')';
  if (record.root >= 0) out << " root " << record.root;
  out << ' ' << record.sent_bytes << " B sent, " << name(record.state) << std::fixed
      << std::setprecision(1) << ", began at " << record.start_us << " us";
  if (record.state != OpState::issued) out << ", took " << record.duration_us << " us";
  return out.str();
}

}  // namespace

FlightRing::FlightRing(size_t capacity) : capacity_(capacity) {
  if (capacity == 0) throw ConfigError("a flight ring's capacity is 0; it must hold a record");
  ring_.reserve(capacity);
}

int64_t FlightRing::begin(Op op, std::string unit, int32_t root, int64_t sent_bytes,
                          Channel channel) {
  std::lock_guard lock(mutex_);
  sent_by_unit_[unit] += sent_bytes;
  sent_by_channel_[static_cast<size_t>(channel)] += sent_bytes;
  FlightRecord record{next_,           step_, op,         channel,  OpState::issued,
                      std::move(unit), root,  sent_bytes, now_us(), 0};
  if (ring_.size() < capacity_) {
    ring_.push_back(std::move(record));
  } else {
    ring_[next_ % capacity_] = std::move(record);
  }
  return next_++;
}

void FlightRing::end(int64_t sequence, OpState state) {
  std::lock_guard lock(mutex_);
  const size_t slot = sequence % capacity_;
  if (slot >= ring_.size() || ring_[slot].sequence != sequence) return;
  ring_[slot].state = state;
  ring_[slot].duration_us = now_us() - ring_[slot].start_us;
}

void FlightRing::set_step(int64_t step) {
  std::lock_guard lock(mutex_);
  step_ = step;
}

std::vector<FlightRecord> FlightRing::records() const {
  std::lock_guard lock(mutex_);
  std::vector<FlightRecord> result = ring_;
  if (ring_.size() == capacity_) {
    std::rotate(result.begin(), result.begin() + next_ % capacity_, result.end());
  }
  return result;
}

int64_t FlightRing::total_operations() const {
  std::lock_guard lock(mutex_);
  return next_;
}

int64_t FlightRing::total_sent_bytes(const std::string& unit_prefix) const {
  std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (auto it = sent_by_unit_.lower_bound(unit_prefix);
       it != sent_by_unit_.end() && it->first.starts_with(unit_prefix); ++it) {
    total += it->second;
  }
  return total;
}

int64_t FlightRing::total_sent_bytes(Channel channel) const {
  std::lock_guard lock(mutex_);
  return sent_by_channel_[static_cast<size_t>(channel)];
}

std::string FlightRing::dump(size_t last) const {
  const auto all = records();
  std::string text;
  for (size_t i = all.size() - std::min(last, all.size()); i < all.size(); ++i) {
    text += line(all[i]) + '\n';
  }
  return text;
}

double FlightRing::now_us() const {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - born_)
      .count();
}

}  // namespace dmuon

#include "engine/step_clock.h"

#include <chrono>
#include <utility>

namespace dmuon {
const char* to_string(Phase phase) {
  static constexpr std::array<const char*, kPhases> kNames{
      "other",         "forward",     "forward_fetch", "backward",  "backward_fetch",
      "reduce_issue",  "reduce_wait", "tp_exchange",   "agreement", "checks",
      "newton_schulz", "publish",     "adamw"};
  return kNames[static_cast<size_t>(phase)];
}

bool waits(Phase phase) {
  switch (phase) {
    case Phase::forward_fetch:
    case Phase::backward_fetch:
    case Phase::reduce_wait:
    case Phase::tp_exchange:
    case Phase::agreement:
    case Phase::publish:
      return true;
    default:
      return false;
  }
}

const char* to_string(Beside what) {
  static constexpr std::array<const char*, kBesides> kNames{"fetch", "reduce", "tp", "publish"};
  return kNames[static_cast<size_t>(what)];
}

StepClock::StepClock(Now now) : now_(now), began_(now()), phase_since_(began_), looked_(began_) {}

int64_t StepClock::steady_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Phase StepClock::turn(Phase to) {
  if (to == phase_) return to;
  std::lock_guard lock(mutex_);
  const int64_t now = advance();
  keep(false, static_cast<uint8_t>(phase_), phase_since_, now);
  phase_since_ = now;
  return std::exchange(phase_, to);
}

std::shared_ptr<void> StepClock::begin(Beside what) {
  std::shared_ptr<void> held(this,
                             [what](void* clock) { static_cast<StepClock*>(clock)->end(what); });
  std::lock_guard lock(mutex_);
  const auto i = static_cast<size_t>(what);
  const int64_t now = advance();
  if (in_progress_[i]++ == 0) since_[i] = now;
  return held;
}

void StepClock::end(Beside what) {
  std::lock_guard lock(mutex_);
  const auto i = static_cast<size_t>(what);
  const int64_t now = advance();
  if (--in_progress_[i] == 0) keep(true, static_cast<uint8_t>(what), since_[i], now);
}

// Charges the time since the last look to what was in progress since then.
int64_t StepClock::advance() {
  const int64_t now = now_();
  const int64_t passed = now - std::exchange(looked_, now);
  current_.phase_ns[static_cast<size_t>(phase_)] += passed;
  const bool hidden = !waits(phase_);
  for (size_t i = 0; i < in_progress_.size(); ++i) {
    if (in_progress_[i] == 0) continue;
    current_.beside_ns[i] += passed;
    if (hidden) current_.hidden_ns[i] += passed;
  }
  return now;
}

void StepClock::keep(bool beside, uint8_t what, int64_t since, int64_t now) {
  if (now == since || current_.spans.size() == StepTimes::kSpans) return;
  current_.spans.push_back({beside, what, since - began_, now - began_});
}

void StepClock::end_step() {
  std::lock_guard lock(mutex_);
  const int64_t now = advance();
  keep(false, static_cast<uint8_t>(phase_), phase_since_, now);
  for (size_t i = 0; i < in_progress_.size(); ++i) {
    if (in_progress_[i] > 0) keep(true, static_cast<uint8_t>(i), since_[i], now);
    since_[i] = now;
  }
  current_.total_ns = now - began_;
  std::swap(current_, last_);
  auto spans = std::move(current_.spans);  // its memory serves again
  spans.clear();
  current_ = {.spans = std::move(spans)};
  began_ = phase_since_ = now;
  phase_ = Phase::other;
  ++steps_;
}

int64_t StepClock::steps() const {
  std::lock_guard lock(mutex_);
  return steps_;
}

StepTimes StepClock::last_step() const {
  std::lock_guard lock(mutex_);
  return last_;
}

}  // namespace dmuon

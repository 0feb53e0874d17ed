// Where the time of a step goes on this rank: what the training thread is in, one phase at a time,
// and what goes on beside it. A step lasts from the end of the one before to its own end, the first
// one from construction.
//
// By a monotonic clock of the host, read once for each change. On an accelerator the host enqueues
// and goes on: these are then the host's times, not the device's.
//
// Phases change on the training thread, or on the one that runs its backward pass; all else is
// legal from any thread.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace dmuon {

enum class Phase : uint8_t {
  other,           // between the others: data, the norm, the user's code
  forward,         // from the first boundary entered to the first hook of the backward pass
  forward_fetch,   // of it, whole weights: issued and waited for
  backward,        // the backward pass
  backward_fetch,  // of it, whole weights
  reduce_issue,    // gradients packed and sent
  reduce_wait,     // and waited for: the end of a pass
  tp_exchange,     // gradients, updates and factors between TP ranks: packed, sent, waited for
  agreement,       // one small all-reduce per pass, per step and per norm: the wait for other ranks
  checks,          // in the step: gradients read for what is not finite, and the rest
  newton_schulz,   // in the step: momentum, Newton-Schulz, update of what this rank owns
  publish,         // updated weights for other replicas: issued and waited for
  adamw            // in the step: what comes after the engine's part of it
};
inline constexpr int kPhases = 13;
const char* to_string(Phase phase);
bool waits(Phase phase);  // for other ranks: communication that nothing hides

// What goes on beside the training thread.
enum class Beside : uint8_t {
  fetch,   // ahead of its use: from the issue until the training thread has the weights
  reduce,  // from the issue until the sum is there; a small one is summed when it is collected
  tp,      // while the lane gathers; updates and factors, from the issue until they are there
  publish  // while the lane updates copies and publishes
};
inline constexpr int kBesides = 4;
const char* to_string(Beside what);

struct StepTimes {
  int64_t total_ns = 0;
  std::array<int64_t, kPhases> phase_ns{};    // add up to total_ns
  std::array<int64_t, kBesides> beside_ns{};  // while there was any
  std::array<int64_t, kBesides> hidden_ns{};  // of it, while the training thread did not wait

  struct Span {
    bool beside = false;
    uint8_t what = 0;                  // a Phase, or what was beside it
    int64_t begin_ns = 0, end_ns = 0;  // since the step began
  };
  std::vector<Span> spans;  // by their end; the first kSpans of the step
  static constexpr size_t kSpans = 4096;
};

class StepClock {
 public:
  using Now = int64_t (*)();  // nanoseconds, never less than before
  explicit StepClock(Now now = steady_ns);

  // What was before. No look at the clock where it is the same.
  Phase turn(Phase to);

  // Turned back when it goes out of scope.
  class Turned {
   public:
    Turned(StepClock& clock, Phase to) : clock_(clock), before_(clock.turn(to)) {}
    ~Turned() { clock_.turn(before_); }
    Turned(const Turned&) = delete;
    Turned& operator=(const Turned&) = delete;

   private:
    StepClock& clock_;
    const Phase before_;
  };
  [[nodiscard]] Turned in(Phase phase) { return Turned(*this, phase); }

  // It goes on until the last copy of what is returned is gone, which must be before the clock is.
  [[nodiscard]] std::shared_ptr<void> begin(Beside what);

  // What is in progress belongs to this step up to now and to the next one from now on.
  void end_step();

  int64_t steps() const;
  StepTimes last_step() const;  // all zero before the first has ended

 private:
  static int64_t steady_ns();
  void end(Beside what);
  int64_t advance();
  void keep(bool beside, uint8_t what, int64_t since, int64_t now);

  const Now now_;
  mutable std::mutex mutex_;
  StepTimes current_, last_;
  Phase phase_ = Phase::other;
  std::array<int, kBesides> in_progress_{};
  std::array<int64_t, kBesides> since_{};  // when in_progress_ became more than 0
  int64_t began_, phase_since_, looked_;
  int64_t steps_ = 0;
};

}  // namespace dmuon

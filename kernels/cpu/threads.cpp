#include "kernels/cpu/threads.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace dmuon::cpu {
namespace {

using Call = void (*)(const void*, int64_t, int);

thread_local bool inside_task = false;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Longer than the gap between two products, shorter than a time slice by far: with more threads
// than cores the others get the core.
template <class T>
void wait_for_change(const std::atomic<T>& value, T old) {
  constexpr int kSpins = 400;
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

// What is left of a job, in one word, so that claiming a task and seeing whose it is are one step.
struct Ticket {
  explicit Ticket(uint64_t word) : word(word) {}
  Ticket(uint64_t epoch, uint64_t threads, uint64_t count)
      : word(epoch << 56 | threads << 48 | count << 24) {}

  uint64_t epoch() const { return word >> 56; }
  int threads() const { return static_cast<int>(word >> 48 & 0xff); }
  int64_t count() const { return static_cast<int64_t>(word >> 24 & 0xffffff); }
  int64_t next() const { return static_cast<int64_t>(word & 0xffffff); }
  bool open_to(int thread) const { return next() < count() && thread < threads(); }

  uint64_t word;
};

// The first exception of a job's tasks, from whichever thread.
class FirstFailure {
 public:
  bool happened() const { return happened_.load(std::memory_order_relaxed); }

  void keep(std::exception_ptr failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!first_) first_ = std::move(failure);
    happened_.store(true, std::memory_order_relaxed);
  }

  // When no task runs any more.
  void rethrow() {
    if (!happened()) return;
    happened_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(first_, nullptr));
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> happened_{false};
  std::exception_ptr first_;
};

constexpr int64_t kMostTasks = 0xffffff;
constexpr int kMostThreads = 0xff;

class Pool {
 public:
  // Lives until the process ends: its threads sleep in it. A child process gets a new one; no lock,
  // which a fork could leave held there.
  static Pool& of_this_process() {
    static std::atomic<Pool*> pool{nullptr};
    Pool* known = pool.load(std::memory_order_acquire);
    if (known != nullptr && known->pid_ == ::getpid()) return *known;
    auto fresh = std::make_unique<Pool>();
    if (pool.compare_exchange_strong(known, fresh.get(), std::memory_order_acq_rel)) {
      return *fresh.release();
    }
    return *known;
  }

  // False where another caller is in it.
  bool run(int threads, int64_t count, Call call, const void* task) {
    const std::unique_lock<std::mutex> lock(one_caller_, std::try_to_lock);
    if (!lock) return false;
    grow(threads - 1);
    call_ = call;
    task_ = task;
    std::fegetenv(&float_modes_);
    left_.store(count, std::memory_order_relaxed);
    const uint64_t epoch = Ticket(ticket_.load(std::memory_order_relaxed)).epoch() + 1;
    ticket_.store(Ticket(epoch, threads, count).word, std::memory_order_release);
    ticket_.notify_all();
    work(0);
    for (int64_t left = left_.load(std::memory_order_acquire); left != 0;
         left = left_.load(std::memory_order_acquire)) {
      wait_for_change(left_, left);
    }
    failure_.rethrow();
    return true;
  }

 private:
  // Where the system gives no more, those there are do the work: each claims what is left.
  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_) {
        std::thread([this, index = workers_ + 1] { serve(index); }).detach();
      }
    } catch (const std::system_error& error) {
      TORCH_WARN_ONCE("dmuon: Newton-Schulz runs on ", workers_ + 1, " threads instead of ",
                      workers + 1, ": the system starts no more (", error.what(), ").");
    }
  }

  [[noreturn]] void serve(int thread) {
    for (;;) {
      const uint64_t exhausted = work(thread);
      wait_for_change(ticket_, exhausted);
    }
  }

  // call_ and task_ are read only with a claimed task in hand: until it is done they stay.
  uint64_t work(int thread) {
    Ticket ticket(ticket_.load(std::memory_order_acquire));
    while (ticket.open_to(thread)) {
      if (!ticket_.compare_exchange_weak(ticket.word, ticket.word + 1, std::memory_order_acq_rel)) {
        continue;
      }
      if (!failure_.happened()) run_task(ticket.next(), thread);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
      ticket = Ticket(ticket_.load(std::memory_order_acquire));
    }
    return ticket.word;
  }

  // As the caller rounds and flushes: bits do not depend on who claims a task.
  void run_task(int64_t index, int thread) noexcept {
    inside_task = true;
    if (thread != 0) std::fesetenv(&float_modes_);
    try {
      call_(task_, index, thread);
    } catch (...) {
      failure_.keep(std::current_exception());
    }
    inside_task = false;
  }

  const pid_t pid_ = ::getpid();
  std::mutex one_caller_;
  int workers_ = 0;
  Call call_ = nullptr;
  const void* task_ = nullptr;
  std::fenv_t float_modes_{};
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> left_{0};
  FirstFailure failure_;
};

}  // namespace

int usable_threads() {
  if (inside_task || at::in_parallel_region()) return 1;
  return std::min(at::get_num_threads(), kMostThreads);
}

namespace detail {

void for_each(int threads, int64_t count, Call call, const void* task) {
  const bool shared = threads > 1 && count > 1 && count <= kMostTasks && !inside_task;
  if (shared && Pool::of_this_process().run(threads, count, call, task)) return;
  for (int64_t i = 0; i < count; ++i) call(task, i, 0);
}

}  // namespace detail
}  // namespace dmuon::cpu

#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <condition_variable>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "engine/error.h"
#include "engine/event_state.h"
#include "engine/host_pool.h"
#include "engine/task_scope.h"

namespace dmuon {
namespace {

class Strand;

// A unit of work, and its event's state: one allocation for both.
class Task final : public Event::State {
 public:
  Task(std::shared_ptr<Strand> strand, std::function<void()> work, std::vector<Event> after)
      : strand_(std::move(strand)), work_(std::move(work)), after_(std::move(after)) {}

  bool query() const noexcept override { return ended_.load(std::memory_order_acquire); }
  void wait() override;
  void synchronize() override { wait(); }

  // Before `task` is pushed: it becomes ready when what it comes after has ended.
  static void depend_on_others(const std::shared_ptr<Task>& task);

 private:
  friend class Strand;
  bool ready() const { return pending_.load(std::memory_order_acquire) == 0; }
  std::vector<std::shared_ptr<Task>> depends_on() const;  // of other lanes, not yet ended
  std::exception_ptr run() noexcept;
  void release() noexcept;

  const std::shared_ptr<Strand> strand_;
  std::function<void()> work_;
  std::vector<Event> after_;
  std::atomic<int> pending_{0};  // events of other lanes not yet reached
  std::atomic<bool> ended_{false};
  std::exception_ptr failure_;                     // written before ended_
  std::vector<std::shared_ptr<Task>> dependents_;  // guarded by the strand
};

using TaskPtr = std::shared_ptr<Task>;
using Lock = std::unique_lock<std::mutex>;

// A lane without its hold on the pool: what tasks and events may keep alive.
//
// The queue is ours, because Asio's strand cannot pause for an event, nor lend its head to a thread
// that waits for it: a waiter that finds the lane idle runs what it waits for, and saves two
// context switches. The strand carries the lane's turns on the pool.
class Strand : public std::enable_shared_from_this<Strand> {
 public:
  Strand(std::string name, HostPool& pool)
      : name_(std::move(name)), executor_(boost::asio::make_strand(pool.executor())) {}

  void push(const TaskPtr& task);
  TaskPtr last();
  void reset();
  void close();  // blocks while a task runs

  void run_until(const Task& task);               // blocks
  bool subscribe(Task& task, TaskPtr dependent);  // false: `task` has ended
  void resolve(Task& dependent);

 private:
  bool runnable() const { return !running_ && !queue_.empty() && queue_.front()->ready(); }
  bool help_others(Lock& lock);
  bool claim_post();
  void post();
  void take_turn();
  void run_ready(Lock& lock, const Task* until);
  void run_head(Lock& lock);
  void end(Lock& lock, Task& task, std::exception_ptr failure);

  const std::string name_;
  std::optional<boost::asio::strand<boost::asio::thread_pool::executor_type>> executor_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TaskPtr> queue_;
  TaskPtr last_;
  std::exception_ptr failure_;  // the first
  bool running_ = false;
  bool posted_ = false;
  bool closed_ = false;
  std::thread::id runner_;
};

void Task::wait() {
  if (!query()) strand_->run_until(*this);
  if (failure_) std::rethrow_exception(failure_);
}

std::vector<TaskPtr> Task::depends_on() const {
  std::vector<TaskPtr> others;
  for (const Event& event : after_) {
    auto other = std::dynamic_pointer_cast<Task>(event.state());
    if (other && other->strand_ != strand_ && !other->query()) others.push_back(std::move(other));
  }
  return others;
}

void Task::depend_on_others(const TaskPtr& task) {
  for (const TaskPtr& other : task->depends_on()) {
    task->pending_.fetch_add(1, std::memory_order_relaxed);
    if (!other->strand_->subscribe(*other, task)) task->pending_.fetch_sub(1);
  }
}

std::exception_ptr Task::run() noexcept {
  std::exception_ptr failure;
  try {
    for (const Event& event : after_) event.synchronize();
    TaskScope scope;
    work_();
  } catch (...) {
    failure = std::current_exception();
  }
  return failure;
}

// What the work holds goes before its event is reached: a waiter may rely on it.
void Task::release() noexcept {
  work_ = nullptr;
  after_.clear();
}

void Strand::push(const TaskPtr& task) {
  Lock lock(mutex_);
  queue_.push_back(task);
  last_ = task;
  const bool mine = claim_post();
  lock.unlock();
  if (mine) post();
}

TaskPtr Strand::last() {
  Lock lock(mutex_);
  return last_;
}

void Strand::reset() {
  Lock lock(mutex_);
  failure_ = nullptr;
  last_ = nullptr;
}

void Strand::close() {
  Lock lock(mutex_);
  closed_ = true;
  changed_.wait(lock, [&] { return !running_; });
  const auto closed = std::make_exception_ptr(
      RuntimeFailure(message("lane '", name_, "' was closed before this work could run")));
  while (!queue_.empty()) {
    const TaskPtr task = std::move(queue_.front());
    queue_.pop_front();
    task->release();
    end(lock, *task, closed);
  }
  last_ = nullptr;
  executor_.reset();  // refers to the pool
}

void Strand::run_until(const Task& task) {
  Lock lock(mutex_);
  while (!task.query()) {
    if (running_ && runner_ == std::this_thread::get_id()) {
      throw ConfigError(
          message("a task of lane '", name_, "' waits for work that comes after it ",
                  "in the same lane. Submit what follows instead of waiting for it."));
    }
    if (runnable() && !closed_) {
      run_ready(lock, &task);
    } else if (!help_others(lock)) {
      changed_.wait(lock);
    }
  }
}

// An idle lane waits for events of other lanes: those are what the caller waits for, too. Did it
// let go of the lock, so that everything may have changed?
bool Strand::help_others(Lock& lock) {
  if (running_ || closed_ || queue_.empty()) return false;
  const std::vector<TaskPtr> others = queue_.front()->depends_on();
  if (others.empty()) return false;  // still locked: the caller misses no change
  lock.unlock();
  for (const TaskPtr& other : others) other->strand_->run_until(*other);
  lock.lock();
  return true;
}

bool Strand::subscribe(Task& task, TaskPtr dependent) {
  Lock lock(mutex_);
  if (task.query()) return false;
  task.dependents_.push_back(std::move(dependent));
  return true;
}

void Strand::resolve(Task& dependent) {
  Lock lock(mutex_);
  dependent.pending_.fetch_sub(1, std::memory_order_acq_rel);
  if (claim_post()) post();
}

bool Strand::claim_post() {
  if (posted_ || closed_ || !runnable()) return false;
  return posted_ = true;
}

void Strand::post() {
  boost::asio::post(*executor_, [self = shared_from_this()] { self->take_turn(); });
}

void Strand::take_turn() {
  Lock lock(mutex_);
  posted_ = false;
  if (runnable()) run_ready(lock, nullptr);
}

void Strand::run_ready(Lock& lock, const Task* until) {
  running_ = true;
  runner_ = std::this_thread::get_id();
  const auto more = [&] { return !closed_ && !queue_.empty() && queue_.front()->ready(); };
  while (more() && !(until && until->query())) run_head(lock);
  running_ = false;
  if (closed_) changed_.notify_all();
  if (claim_post()) post();
}

void Strand::run_head(Lock& lock) {
  const TaskPtr task = std::move(queue_.front());
  queue_.pop_front();
  std::exception_ptr failure = failure_;
  lock.unlock();
  if (!failure) failure = task->run();
  task->release();
  lock.lock();
  end(lock, *task, std::move(failure));
}

void Strand::end(Lock& lock, Task& task, std::exception_ptr failure) {
  if (!failure_) failure_ = failure;
  task.failure_ = std::move(failure);
  const auto dependents = std::move(task.dependents_);
  task.ended_.store(true, std::memory_order_release);
  lock.unlock();
  changed_.notify_all();
  for (const TaskPtr& dependent : dependents) dependent->strand_->resolve(*dependent);
  lock.lock();
}

class HostLane final : public Lane {
 public:
  explicit HostLane(std::string name)
      : pool_(HostPool::shared()), strand_(std::make_shared<Strand>(std::move(name), *pool_)) {
    pool_->add_lane();
  }

  ~HostLane() override {
    if (pool_->forked()) {
      abandon();
    } else {
      strand_->close();
      pool_->remove_lane();
    }
  }

  Event submit(std::function<void()> work, std::vector<Event> after) override {
    auto task = std::make_shared<Task>(strand_, std::move(work), std::move(after));
    Task::depend_on_others(task);
    strand_->push(task);
    return Event(std::move(task));
  }

  Event record() override { return Event(strand_->last()); }
  void reset() override { strand_->reset(); }

 private:
  // In a child process the threads are gone, and whatever they held stays locked.
  void abandon() {
    new auto(pool_);
    new auto(strand_);
  }

  const std::shared_ptr<HostPool> pool_;
  const std::shared_ptr<Strand> strand_;
};

}  // namespace

std::unique_ptr<Lane> make_host_lane(std::string name) {
  return std::make_unique<HostLane>(std::move(name));
}

}  // namespace dmuon

// The threads that all host lanes of a process share.
#pragma once
#include <sys/types.h>
#include <unistd.h>

#include <boost/asio/thread_pool.hpp>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace dmuon {

// At least as many threads as lanes: a lane runs one task at a time, so a task that blocks, say in
// a collective, never takes the thread that another lane needs. Created by the first lane; the
// last lane to go joins the threads, so none outlives the lanes.
//
// A child process inherits no threads: after a fork it gets a pool of its own.
class HostPool {
 public:
  static std::shared_ptr<HostPool> shared();

  HostPool() = default;
  ~HostPool();

  void add_lane();
  void remove_lane();
  boost::asio::thread_pool::executor_type executor() { return pool_.get_executor(); }
  bool forked() const { return ::getpid() != pid_; }

 private:
  static constexpr int first_threads = 4;  // materialise, reduce, publish, tp

  const pid_t pid_ = ::getpid();
  boost::asio::thread_pool pool_{first_threads};
  std::mutex mutex_;
  std::vector<std::thread> more_;
  int lanes_ = 0;
};

}  // namespace dmuon

#include "engine/host_pool.h"

namespace dmuon {

std::shared_ptr<HostPool> HostPool::shared() {
  struct Registry {
    std::mutex mutex;
    std::weak_ptr<HostPool> pool;
  };
  static Registry& registry = *new Registry;  // never destroyed: a lane may outlive static objects
  std::lock_guard lock(registry.mutex);
  auto pool = registry.pool.lock();
  if (!pool || pool->forked()) {
    pool = std::make_shared<HostPool>();
    registry.pool = pool;
  }
  return pool;
}

HostPool::~HostPool() {
  pool_.stop();
  pool_.join();
  for (auto& thread : more_) thread.join();
}

void HostPool::add_lane() {
  std::lock_guard lock(mutex_);
  if (++lanes_ > first_threads + static_cast<int>(more_.size())) {
    more_.emplace_back([this] { pool_.attach(); });
  }
}

void HostPool::remove_lane() {
  std::lock_guard lock(mutex_);
  --lanes_;
}

}  // namespace dmuon

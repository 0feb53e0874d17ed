// The few threads that share one Newton-Schulz, or one list of them.
#pragma once
#include <cstdint>

namespace dmuon::cpu {

// How many threads the caller may use: at::get_num_threads(), or 1 inside a parallel region of
// torch's and inside for_each.
int usable_threads();

namespace detail {
void for_each(int threads, int64_t count, void (*call)(const void*, int64_t, int),
              const void* task);
}

// Calls task(index, thread) once for each index in [0, count), in any order, the calling thread
// being number 0 of `threads`. Returns when all are done, and rethrows the first exception of any;
// the tasks that had not begun by then are left out. The threads are the process's own, made on
// first use and asleep between calls. Where another caller has them, or inside a task, the calling
// thread does all of it: so what a task does must not depend on `thread`, beyond which buffer it
// uses.
template <class Task>
void for_each(int threads, int64_t count, const Task& task) {
  detail::for_each(
      threads, count,
      [](const void* t, int64_t index, int thread) {
        (*static_cast<const Task*>(t))(index, thread);
      },
      &task);
}

}  // namespace dmuon::cpu

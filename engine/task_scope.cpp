#include "engine/task_scope.h"

#include <ATen/Parallel.h>

// Of the OpenMP and MKL that torch itself uses, where it uses them. at::set_num_threads would do
// for the calling thread, but it changes MKL's count for the whole process.
extern "C" {
[[gnu::weak]] int omp_get_max_threads();
[[gnu::weak]] void omp_set_num_threads(int);
[[gnu::weak]] int MKL_Set_Num_Threads_Local(int);
}

namespace dmuon {
namespace {

// ATen sets a thread's count at its first parallel region: get that over with.
void settle_intra_op_threads() {
  thread_local const int settled [[maybe_unused]] = at::get_num_threads();
}

int set_openmp_threads(int count) {
  if (!omp_set_num_threads || !omp_get_max_threads) return 0;
  const int before = omp_get_max_threads();
  if (before != count) omp_set_num_threads(count);
  return before;
}

int set_mkl_threads(int count) {
  return MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(count) : 0;
}

}  // namespace

TaskScope::TaskScope() {
  settle_intra_op_threads();
  openmp_threads_ = set_openmp_threads(1);
  mkl_threads_ = set_mkl_threads(1);
}

TaskScope::~TaskScope() {
  if (openmp_threads_ > 0) set_openmp_threads(openmp_threads_);
  set_mkl_threads(mkl_threads_);
}

}  // namespace dmuon

// The thread-local state under which lanes run work.
#pragma once
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace dmuon {

// Whatever thread a task lands on, its tensor operations behave alike: no autograd, no inference
// mode, no autocast, no Python dispatch or functorch mode of the calling thread, and one intra-op
// thread, so that a result does not depend on who ran the task. Restored at the end.
class TaskScope {
 public:
  TaskScope();
  ~TaskScope();
  TaskScope(const TaskScope&) = delete;
  TaskScope& operator=(const TaskScope&) = delete;

 private:
  c10::InferenceMode no_inference_{false};
  c10::NoGradGuard no_grad_;
  c10::impl::ForceDispatchKeyGuard default_keys_{c10::default_included_set,
                                                 c10::default_excluded_set};
  int openmp_threads_;
  int mkl_threads_;
};

}  // namespace dmuon

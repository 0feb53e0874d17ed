// Where the engine meets autograd. The only place that includes its headers.
//
// Everything here runs without the GIL, on the thread that runs the backward pass.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace dmuon {

// The nodes on which the hooks of one boundary sit, in all graphs that are still alive.
class HookedNodes {
 public:
  // Whether the backward pass that runs now will reach one of them.
  bool any_in_current_pass() const;

 private:
  friend class PreHook;
  mutable std::mutex mutex_;  // a graph may be freed on any thread
  std::vector<const void*> nodes_;
};

// Calls `f` before the backward pass uses the gradient of any of `outputs`: a pre-hook on the
// grad_fn of each base tensor, so that in-place operations on an output or on a view of it keep it.
// The nodes are in `nodes` as long as they live. Returns how many were hooked: 0 where nothing
// requires a gradient or all are leaves.
int before_backward(const std::vector<at::Tensor>& outputs, const std::function<void()>& f,
                    const std::shared_ptr<HookedNodes>& nodes);

// Calls `f` each time a gradient has been accumulated into `parameter`. The hook stays on the
// parameter's accumulator, which lives as long as this object does.
class AccumulationHook {
 public:
  AccumulationHook(const at::Tensor& parameter, std::function<void()> f);
  ~AccumulationHook();
  AccumulationHook(AccumulationHook&&) noexcept;
  AccumulationHook& operator=(AccumulationHook&&) noexcept;

  // Whether the backward pass that runs now will bring a gradient.
  bool in_current_pass() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// -1 outside of a backward pass. Differs between nested passes (reentrant checkpointing).
int graph_task_id();

// Runs `f` when the innermost backward pass ends without an error.
void at_end_of_backward(std::function<void()> f);

}  // namespace dmuon

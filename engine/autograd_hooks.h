// Where the engine meets autograd. The only place that includes its headers.
//
// Everything here runs without the GIL, on the thread that runs the backward pass.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace dmuon {

// Calls `f` before the backward pass uses the gradient of any of `outputs`: a pre-hook on the
// grad_fn of each base tensor, so that in-place operations on an output or on a view of it keep it.
// Returns how many nodes were hooked: 0 where nothing requires a gradient or all are leaves.
int before_backward(const std::vector<at::Tensor>& outputs, const std::function<void()>& f);

// Calls `f` each time a gradient has been accumulated into `parameter`. The hook stays on the
// parameter's accumulator, which lives as long as this object does.
class AccumulationHook {
 public:
  AccumulationHook(const at::Tensor& parameter, std::function<void()> f);
  ~AccumulationHook();
  AccumulationHook(AccumulationHook&&) noexcept;
  AccumulationHook& operator=(AccumulationHook&&) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// -1 outside of a backward pass. Differs between nested passes (reentrant checkpointing).
int graph_task_id();

// Runs `f` when the innermost backward pass ends without an error.
void at_end_of_backward(std::function<void()> f);

}  // namespace dmuon

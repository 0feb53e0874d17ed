// One dedicated parameter in its unit: its tensors, its gradients.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "engine/autograd_hooks.h"
#include "engine/layout.h"

namespace dmuon {

// A parameter may be a wrapper around the tensor that this rank holds (a DTensor), and so are its
// gradients. Called on the training thread or in its backward pass.
class TensorWrapper {
 public:
  virtual ~TensorWrapper() = default;

  // What this rank holds of a gradient, laid out as the parameter is: plain, dense. May
  // communicate, where the gradient has another layout.
  virtual at::Tensor unwrap(const at::Tensor& gradient) = 0;
  virtual at::Tensor wrap(const at::Tensor& local) = 0;
};

// Shapes and offsets are this rank's, the TP shard's where the matrix is cut.
struct Slot {
  int32_t matrix = -1;   // index into the plan
  int32_t segment = -1;  // index into UnitStore::segments()
  int64_t offset = 0;    // in the segment, in elements
  int64_t numel = 0;
  std::vector<int64_t> sizes, strides;  // contiguous
  TpLayout layout;
  int tp_owner = 0;
  bool owned = false;  // this rank's cell owns the matrix: the master of its shard lies here
  bool leads = false;  // and this rank is its TP owner
  // In the owner's cell, where it has several TP ranks and the route is muon:
  bool shared = false;
  bool in_shards = false;  // gradient and update stay in the shards, or
  bool gathers = false;    // the gradient goes to the TP owner, where it is cut,
  bool scatters = false;   // and the update comes from there

  at::Tensor parameter;  // the object that module, autograd and optimizer see, all the time
  std::shared_ptr<TensorWrapper> wrapper;  // null where it is a plain tensor
  at::Tensor inner;        // whose memory comes and goes: the parameter, or what it wraps
  at::Tensor placeholder;  // what it shows between uses
  at::Tensor whole;        // what it shows in use

  // `parameter.grad` between passes is `shown_grad`: the reduced gradient on the owner, what
  // no_sync has accumulated elsewhere. Both are put aside here while a pass accumulates a new one.
  at::Tensor reduced;     // owner only: the mean over the data-parallel ranks, float32
  at::Tensor local;       // not reduced yet
  at::Tensor shown_grad;  // which object we handed out; another one, or none, is the user's doing
  bool fired = false;
  std::optional<AccumulationHook> hook;

  at::Tensor gathered;          // TP owner only: `reduced` of all TP ranks put together
  bool gathered_known = true;   // false: it is not what `reduced` has ever been
  uint64_t gathered_print = 0;  // fingerprint of `reduced` when it was

  void forget_gradients();
  void show_gradient(const at::Tensor& local);
  bool shows_ours() const;  // whether `parameter.grad` is what we handed out, written or not
  at::Tensor unwrapped(const at::Tensor& gradient) const;
  at::Tensor gradient() const;  // what `parameter.grad` is on this rank, plain
  // Whether `gathered` is what the TP ranks' `reduced` make together; the second: and nobody has
  // cleared, replaced or written their `parameter.grad` since.
  bool gathered_matches() const;
  bool gathered_is_current() const;
  void note_gathered();
};

}  // namespace dmuon

#include "engine/slot.h"

#include "kernels/fingerprint.h"

namespace dmuon {

void Slot::forget_gradients() {
  reduced = local = shown_grad = gathered = at::Tensor();
  gathered_known = true;
  gathered_print = 0;
}

void Slot::show_gradient(const at::Tensor& plain) {
  shown_grad = wrapper && plain.defined() ? wrapper->wrap(plain) : plain;
  parameter.mutable_grad() = shown_grad;
}

// The wrapper may be the same and wrap another tensor (`p.grad.data = ...`).
bool Slot::shows_ours() const {
  const at::Tensor& current = parameter.grad();
  if (!current.defined() || !current.is_same(shown_grad)) return false;
  return !wrapper || wrapper->unwrap(current).is_alias_of(reduced.defined() ? reduced : local);
}

at::Tensor Slot::unwrapped(const at::Tensor& gradient) const {
  return wrapper && gradient.defined() ? wrapper->unwrap(gradient) : gradient;
}

at::Tensor Slot::gradient() const { return unwrapped(parameter.grad()); }

bool Slot::gathered_matches() const {
  return gathered_known && fingerprint(reduced) == gathered_print;
}

bool Slot::gathered_is_current() const {
  if (!parameter.grad().defined()) return !reduced.defined() && gathered_matches();
  return shows_ours() && gathered_matches();
}

void Slot::note_gathered() {
  gathered_known = true;
  gathered_print = fingerprint(reduced);
}

}  // namespace dmuon

#include "engine/slot.h"

namespace dmuon {

void Slot::forget_gradients() {
  reduced = local = shown_grad = gathered = at::Tensor();
  gathered_version = kNone;
}

void Slot::show_gradient(const at::Tensor& plain) {
  shown_grad = wrapper && plain.defined() ? wrapper->wrap(plain) : plain;
  parameter.mutable_grad() = shown_grad;
  shown_version = shown_grad.defined() ? static_cast<int64_t>(shown_grad._version()) : 0;
}

bool Slot::shown_grad_written() const {
  return shown_grad.defined() && static_cast<int64_t>(shown_grad._version()) != shown_version;
}

at::Tensor Slot::unwrapped(const at::Tensor& gradient) const {
  return wrapper && gradient.defined() ? wrapper->unwrap(gradient) : gradient;
}

at::Tensor Slot::gradient() const {
  const at::Tensor& current = parameter.grad();
  if (!current.defined() || !wrapper) return current;
  if (!current.is_same(shown_grad)) return wrapper->unwrap(current);
  return reduced.defined() ? reduced : local;
}

bool Slot::gathered_matches() const {
  const int64_t version = reduced.defined() ? static_cast<int64_t>(reduced._version()) : kNone;
  return version == gathered_version;
}

bool Slot::gathered_is_current() const {
  const at::Tensor& current = parameter.grad();
  if (!current.defined()) return !reduced.defined() && gathered_matches();
  return current.is_same(shown_grad) && !shown_grad_written() && gathered_matches();
}

void Slot::note_gathered() {
  gathered_version = reduced.defined() ? static_cast<int64_t>(reduced._version()) : kNone;
  shown_version = shown_grad.defined() ? static_cast<int64_t>(shown_grad._version()) : 0;
}

}  // namespace dmuon

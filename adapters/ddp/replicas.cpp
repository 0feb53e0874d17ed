#include "adapters/ddp/replicas.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "kernels/pack.h"

namespace dmuon {
namespace {

// Sums of 16-bit gradients are made in float32 on the host, where some backends know no others.
at::ScalarType travelling(const at::Tensor& parameter) {
  const bool small = parameter.dtype().itemsize() < 4;
  return parameter.is_cpu() && small ? at::kFloat : parameter.scalar_type();
}

}  // namespace

Replicas::Replicas(std::vector<ReplicatedParameter> parameters,
                   std::unique_ptr<Transport> transport, std::shared_ptr<Lane> lane,
                   int64_t bucket_bytes)
    : transport_(std::move(transport)), lane_(std::move(lane)) {
  for (auto& parameter : parameters) members_.push_back({.of = std::move(parameter)});
  make_buckets(bucket_bytes);
}

// One dtype and device each. A first small one would start sooner; what comes first in backward is
// seldom what takes long.
void Replicas::make_buckets(int64_t bucket_bytes) {
  int64_t bytes = 0;
  const at::Tensor* last = nullptr;
  for (int m = static_cast<int>(members_.size()) - 1; m >= 0; --m) {
    const at::Tensor& parameter = members_[m].of.inner;
    const bool fits = last && last->scalar_type() == parameter.scalar_type() &&
                      last->device() == parameter.device() && bytes < bucket_bytes;
    if (!fits) {
      buckets_.emplace_back();
      bytes = 0;
    }
    bytes += parameter.numel() * static_cast<int64_t>(parameter.dtype().itemsize());
    last = &parameter;
    members_[m].bucket = static_cast<int>(buckets_.size()) - 1;
    buckets_.back().members.push_back(m);
  }
}

void Replicas::broadcast(const std::vector<at::Tensor>& tensors, const std::string& name) {
  std::vector<Broadcast> parts;
  std::vector<at::Tensor> dense;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    dense.push_back(tensor.contiguous());
    parts.push_back({dense.back().view({-1}), 0});
  }
  transport_->broadcast(parts, name);
  size_t i = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (!dense[i].is_same(tensor)) tensor.variable_data().copy_(dense[i]);
    ++i;
  }
}

void Replicas::watch() {
  for (int m = 0; m < static_cast<int>(members_.size()); ++m) {
    const at::Tensor& parameter = members_[m].of.parameter;
    if (members_[m].hook || !parameter.requires_grad()) continue;
    members_[m].hook.emplace(parameter, [weak = weak_from_this(), m] {
      if (auto replicas = weak.lock()) replicas->accumulated(m);
    });
  }
}

void Replicas::accumulated(int m) {
  if (!synchronize_) return;
  begin_pass();
  Bucket& bucket = buckets_[members_[m].bucket];
  if (bucket.issued) bucket.fired_again = true;
  const bool again = std::exchange(members_[m].fired, true);
  if (!again && members_[m].counted && --bucket.pending == 0) issue_ready();
}

void Replicas::begin_pass() {
  if (in_pass_ && !pass_alive_.expired()) return;
  in_pass_ = true;
  next_ = 0;
  for (auto& bucket : buckets_) {
    bucket.reduced.wait();
    bucket.pending = 0;
    bucket.issued = bucket.fired_again = false;
  }
  at::Tensor reached = at::zeros({static_cast<int64_t>(members_.size())}, at::kInt);
  auto* data = reached.data_ptr<int32_t>();
  for (size_t m = 0; m < members_.size(); ++m) {
    data[m] = members_[m].hook && members_[m].hook->in_current_pass();
  }
  for (size_t m = 0; m < members_.size(); ++m) {
    members_[m].fired = false;
    members_[m].counted = data[m] != 0;
    buckets_[members_[m].bucket].pending += data[m];
  }
  lane_->run([&] { transport_->all_reduce(reached, ReduceOp::max, "(pass)"); });
  for (size_t m = 0; m < members_.size(); ++m) members_[m].expected = data[m] != 0;
  auto alive = std::make_shared<int>();
  pass_alive_ = alive;
  at_end_of_backward([weak = weak_from_this(), alive] {
    if (auto replicas = weak.lock()) replicas->end_pass();
  });
}

// In one order on all ranks: a bucket that is complete early waits for those before it.
void Replicas::issue_ready() {
  for (; next_ < buckets_.size(); ++next_) {
    if (buckets_[next_].pending > 0) return;
    issue(buckets_[next_]);
  }
}

void Replicas::issue(Bucket& bucket) {
  bucket.issued = true;
  bucket.fired_again = false;
  int64_t numel = 0;
  for (const int m : bucket.members) {
    if (members_[m].expected) numel += members_[m].of.inner.numel();
  }
  if (numel == 0) return;
  const at::Tensor& first = members_[bucket.members.front()].of.inner;
  bucket.flat = at::empty({numel}, first.options().dtype(travelling(first)).requires_grad(false));
  int64_t at = 0;
  for (const int m : bucket.members) {
    const auto& [parameter, inner, wrapper] = members_[m].of;
    if (!members_[m].expected) continue;
    const at::Tensor gradient = parameter.grad();
    pack_one(bucket.flat, at, inner.numel(),
             wrapper && gradient.defined() ? wrapper->unwrap(gradient) : gradient);
    at += inner.numel();
  }
  ++reductions_;
  bucket.reduced = lane_->submit(
      [this, flat = bucket.flat] { transport_->all_reduce(flat, ReduceOp::sum, "(replicas)"); });
}

void Replicas::finish(Bucket& bucket) {
  bucket.reduced.wait();
  if (!bucket.flat.defined()) return;
  bucket.flat.mul_(1.0 / transport_->size());
  int64_t at = 0;
  for (const int m : bucket.members) {
    if (!members_[m].expected) continue;
    const at::Tensor& inner = members_[m].of.inner;
    put(members_[m], bucket.flat.narrow(0, at, inner.numel()).view(inner.sizes()));
    at += inner.numel();
  }
  bucket.flat = at::Tensor();
}

// Into the gradient that is there, so that whoever holds it sees the mean.
void Replicas::put(Member& member, const at::Tensor& mean) {
  at::Tensor& gradient = member.of.parameter.mutable_grad();
  if (member.of.wrapper) {
    gradient = member.of.wrapper->wrap(mean.to(member.of.inner.scalar_type(), false, true));
  } else if (gradient.defined()) {
    gradient.variable_data().copy_(mean);
  } else {
    gradient = mean.to(member.of.inner.scalar_type(), false, true);
  }
}

void Replicas::end_pass() {
  for (auto& bucket : buckets_) bucket.pending = 0;
  issue_ready();
  in_pass_ = false;
  c10::NoGradGuard no_grad;
  issue_late();
  for (auto& bucket : buckets_) finish(bucket);
}

// Reentrant checkpointing brings parameters that could not be foreseen, and one parameter twice.
// Both are in `grad` with all else, which nobody has overwritten yet: their buckets go again.
void Replicas::issue_late() {
  const auto members = static_cast<int64_t>(members_.size());
  at::Tensor late = at::zeros({members + static_cast<int64_t>(buckets_.size())}, at::kInt);
  auto* data = late.data_ptr<int32_t>();
  for (int64_t m = 0; m < members; ++m) data[m] = members_[m].fired && !members_[m].expected;
  for (size_t b = 0; b < buckets_.size(); ++b) data[members + b] = buckets_[b].fired_again;
  lane_->run([&] { transport_->all_reduce(late, ReduceOp::max, "(pass)"); });
  for (int64_t m = 0; m < members; ++m) {
    if (data[m] == 0) continue;
    members_[m].expected = true;
    data[members + members_[m].bucket] = 1;
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (data[members + b] == 0) continue;
    buckets_[b].reduced.wait();
    issue(buckets_[b]);
  }
}

}  // namespace dmuon

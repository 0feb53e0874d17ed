#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "engine/error.h"
#include "engine/flight_ring.h"
#include "engine/traffic.h"
#include "engine/transport.h"
#include "engine/transport_checks.h"

// torch 2.14 renamed collectives; the older names exist in every version from 2.11 on.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace dmuon {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

struct Call {
  Op op;
  int root;  // -1: none
  int64_t tensor_bytes;
  int64_t sent_bytes;
  std::function<Work(c10d::ProcessGroup&)> issue;
  int64_t sequence = -1;
  Work work{};
  bool done = false;
};

// What nothing is added up of travels as bytes where its type may be unknown to a backend, as bf16
// is to some builds of gloo.
bool known_everywhere(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat; }

at::Tensor as_flat(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.dim() == 1 ? tensor : tensor.view({-1});
  return known_everywhere(tensor) ? flat : flat.view(at::kByte);
}

int64_t items_per_element(const at::Tensor& tensor) {
  return known_everywhere(tensor) ? 1 : tensor.element_size();
}

std::vector<int64_t> times(std::vector<int64_t> counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

std::string text_of(const std::exception& failure) {
  const auto* error = dynamic_cast<const c10::Error*>(&failure);
  return error ? error->what_without_backtrace() : failure.what();
}

// Past the dispatcher, which costs several times the call itself.
c10::intrusive_ptr<c10d::Backend> backend_of(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  return group.getBackend(tensor.device().type());
}

// On an accelerator: on the current stream, without a stream of the backend's own.
template <class Options>
Options options_for(const at::Tensor& tensor, Options options = {}) {
  options.asyncOp = tensor.is_cpu();
  return options;
}

class C10dTransport final : public Transport {
 public:
  C10dTransport(Group group, FlightRing* ring, Channel channel)
      : group_(std::move(group)),
        ring_(ring),
        channel_(channel),
        traffic_{group_->getRank(), group_->getSize()} {}

  int rank() const override { return traffic_.rank; }
  int size() const override { return traffic_.size; }

  void broadcast(const std::vector<Broadcast>& parts, const std::string& unit) override {
    auto calls = broadcast_calls(parts, unit);
    run(calls, unit);
  }

  std::unique_ptr<Pending> start_broadcast(const std::vector<Broadcast>& parts,
                                           const std::string& unit) override {
    auto calls = broadcast_calls(parts, unit);
    issue_all(calls, unit);
    std::vector<at::Tensor> held;
    for (const Broadcast& part : parts) held.push_back(part.tensor);
    return std::make_unique<Issued>(*this, std::move(calls), unit, std::move(held));
  }

  void exchange(at::Tensor recv, const std::vector<int64_t>& recv_counts, at::Tensor send,
                const std::vector<int64_t>& send_counts, const std::string& unit) override {
    start_exchange(std::move(recv), recv_counts, std::move(send), send_counts, unit)->wait();
  }

  std::unique_ptr<Pending> start_exchange(at::Tensor recv, const std::vector<int64_t>& recv_counts,
                                          at::Tensor send, const std::vector<int64_t>& send_counts,
                                          const std::string& unit) override {
    require_exchange(recv, recv_counts, send, send_counts, rank(), size(), unit);
    const int64_t bytes = send.nbytes();
    std::vector<Call> calls;
    calls.push_back({Op::exchange, -1, bytes, bytes, [&](c10d::ProcessGroup& group) {
                       at::Tensor out = as_flat(recv), in = as_flat(send);
                       auto out_splits = times(recv_counts, items_per_element(recv));
                       auto in_splits = times(send_counts, items_per_element(send));
                       return backend_of(group, in)->alltoall_base(
                           out, in, out_splits, in_splits,
                           options_for<c10d::AllToAllOptions>(recv));
                     }});
    issue_all(calls, unit);
    return std::make_unique<Issued>(*this, std::move(calls), unit, std::vector{recv, send});
  }

  void all_reduce(at::Tensor tensor, ReduceOp op, const std::string& unit) override {
    require_dense(tensor, unit);
    const int64_t bytes = tensor.nbytes();
    run({Op::all_reduce, -1, bytes, traffic_.all_reduce(bytes),
         [&](c10d::ProcessGroup& group) {
           std::vector<at::Tensor> tensors{tensor};
           auto options = options_for<c10d::AllreduceOptions>(tensor);
           options.reduceOp = op == ReduceOp::sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
           return backend_of(group, tensor)->allreduce(tensors, options);
         }},
        unit);
  }

  void all_gather(at::Tensor out, at::Tensor in, const std::string& unit) override {
    require_gather(out, in, size(), unit);
    if (size() == 1) out.view({-1}).copy_(in.view({-1}));
    const int64_t bytes = in.nbytes();
    run({Op::all_gather, -1, bytes, traffic_.all_gather(bytes),
         [&](c10d::ProcessGroup& group) {
           at::Tensor to = as_flat(out), from = as_flat(in);
           return backend_of(group, in)->_allgather_base(to, from,
                                                         options_for<c10d::AllgatherOptions>(in));
         }},
        unit);
  }

  void abort(const std::string& reason) override {
    close("aborted: " + reason);
    const Group group = release_group();
    try {
      if (group) group->abort();
    } catch (const std::exception&) {  // the reason is what matters, not how the backend took it
    }
  }

 private:
  std::vector<Call> broadcast_calls(const std::vector<Broadcast>& parts,
                                    const std::string& unit) const {
    std::vector<Call> calls;
    calls.reserve(parts.size());
    for (const Broadcast& part : parts) {
      require_dense(part.tensor, unit);
      require_root(part.root, size(), unit);
      calls.push_back(broadcast_call(part));
    }
    return calls;
  }

  Call broadcast_call(const Broadcast& part) const {
    const int64_t bytes = part.tensor.nbytes();
    return {Op::broadcast, part.root, bytes, traffic_.broadcast(part.root, bytes),
            [&part](c10d::ProcessGroup& group) {
              std::vector<at::Tensor> tensors{as_flat(part.tensor)};
              auto options = options_for<c10d::BroadcastOptions>(part.tensor);
              options.rootRank = part.root;
              return backend_of(group, part.tensor)->broadcast(tensors, options);
            }};
  }

  void run(Call call, const std::string& unit) {
    std::vector<Call> calls;
    calls.push_back(std::move(call));
    run(calls, unit);
  }

  class Issued final : public Pending {
   public:
    Issued(C10dTransport& transport, std::vector<Call> calls, std::string unit,
           std::vector<at::Tensor> held)
        : transport_(transport),
          calls_(std::move(calls)),
          unit_(std::move(unit)),
          held_(std::move(held)) {}

    void wait() override { transport_.finish_all(calls_, unit_); }

   private:
    C10dTransport& transport_;
    std::vector<Call> calls_;
    const std::string unit_;
    const std::vector<at::Tensor> held_;
  };

  // Issues all, then waits for all.
  void run(std::vector<Call>& calls, const std::string& unit) {
    issue_all(calls, unit);
    finish_all(calls, unit);
  }

  void issue_all(std::vector<Call>& calls, const std::string& unit) {
    const Group group = open_group(unit);
    if (size() == 1) return;
    guarded(calls, unit, [&](Call& call) { issue(call, *group, unit); });
  }

  void finish_all(std::vector<Call>& calls, const std::string& unit) {
    if (size() == 1) return;
    guarded(calls, unit, [&](Call& call) { finish(call); });
  }

  template <class F>
  void guarded(std::vector<Call>& calls, const std::string& unit, const F& each) {
    size_t at = 0;
    try {
      for (; at < calls.size(); ++at) each(calls[at]);
    } catch (const std::exception& failure) {
      fail(calls, calls[at], unit, text_of(failure));
    }
  }

  void issue(Call& call, c10d::ProcessGroup& group, const std::string& unit) {
    if (ring_) call.sequence = ring_->begin(call.op, unit, call.root, call.sent_bytes, channel_);
    call.work = std::exchange(call.issue, nullptr)(group);
  }

  void finish(Call& call) {
    if (call.work) call.work->wait();
    call.done = true;
    if (ring_) ring_->end(call.sequence, OpState::done);
  }

  [[noreturn]] void fail(const std::vector<Call>& calls, const Call& culprit,
                         const std::string& unit, const std::string& text) {
    for (const Call& call : calls) {
      if (ring_ && call.sequence >= 0 && !call.done) ring_->end(call.sequence, OpState::failed);
    }
    std::string what =
        message(to_string(culprit.op), " '", unit, "' of ", culprit.tensor_bytes, " bytes");
    if (culprit.root >= 0) what += message(" from rank ", culprit.root);
    what += message(" failed on rank ", rank(), " of ", size(), ": ", text);
    close(what);
    throw RuntimeFailure(closed_reason() + history());
  }

  std::string history() const {
    return ring_ ? "\nThe last operations of this rank:\n" + ring_->dump(8) : "";
  }

  void close(const std::string& reason) {
    std::lock_guard lock(mutex_);
    closed_ += (closed_.empty() ? "" : "; ") + reason;
  }

  Group release_group() {
    std::lock_guard lock(mutex_);
    return std::exchange(group_, nullptr);
  }

  std::string closed_reason() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }

  Group open_group(const std::string& unit) const {
    std::lock_guard lock(mutex_);
    if (closed_.empty()) return group_;
    throw RuntimeFailure(message("'", unit, "': this group is closed since ", closed_));
  }

  mutable std::mutex mutex_;
  Group group_;         // null once aborted
  std::string closed_;  // why; empty while open
  FlightRing* const ring_;
  const Channel channel_;
  const Traffic traffic_;
};

Group resolve(const std::string& group_name) {
  try {
    return c10d::resolve_process_group(group_name);
  } catch (const c10::Error&) {
    throw ConfigError(
        message("there is no process group named '", group_name,
                "' in this process. Pass the group_name of a group that exists here."));
  }
}

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(const std::string& group_name, FlightRing* ring,
                                               Channel channel) {
  return make_c10d_transport(resolve(group_name), ring, channel);
}

std::unique_ptr<Transport> make_c10d_transport(Group group, FlightRing* ring, Channel channel) {
  return std::make_unique<C10dTransport>(std::move(group), ring, channel);
}

std::unique_ptr<Transport> make_c10d_transport(const std::string& group_name, FlightRing* ring) {
  return make_c10d_transport(group_name, ring, Channel::control);
}

std::unique_ptr<Transport> make_c10d_transport(Group group, FlightRing* ring) {
  return make_c10d_transport(std::move(group), ring, Channel::control);
}

}  // namespace dmuon

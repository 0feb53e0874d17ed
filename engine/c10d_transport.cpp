#include <mutex>
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
  std::function<Work()> issue;
  int64_t sequence = -1;
  Work work{};
  bool done = false;
};

// Every type travels as bytes where nothing is added up: not every gloo knows bf16.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

std::vector<int64_t> times(std::vector<int64_t> counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

std::string text_of(const std::exception& failure) {
  const auto* error = dynamic_cast<const c10::Error*>(&failure);
  return error ? error->what_without_backtrace() : failure.what();
}

// On an accelerator: on the current stream, without a stream of the backend's own.
template <class Options>
Options options_for(const at::Tensor& tensor, Options options = {}) {
  options.asyncOp = tensor.is_cpu();
  return options;
}

class C10dTransport final : public Transport {
 public:
  C10dTransport(Group group, FlightRing* ring)
      : group_(std::move(group)), ring_(ring), traffic_{group_->getRank(), group_->getSize()} {}

  int rank() const override { return traffic_.rank; }
  int size() const override { return traffic_.size; }

  void broadcast(const std::vector<Broadcast>& parts, const std::string& unit) override {
    std::vector<Call> calls;
    calls.reserve(parts.size());
    for (const Broadcast& part : parts) {
      require_dense(part.tensor, unit);
      require_root(part.root, size(), unit);
      calls.push_back(broadcast_call(part));
    }
    run(calls, unit);
  }

  void exchange(at::Tensor recv, const std::vector<int64_t>& recv_counts, at::Tensor send,
                const std::vector<int64_t>& send_counts, const std::string& unit) override {
    require_exchange(recv, recv_counts, send, send_counts, rank(), size(), unit);
    const int64_t bytes = send.nbytes();
    run({Op::exchange, -1, bytes, bytes,
         [&] {
           at::Tensor out = as_bytes(recv), in = as_bytes(send);
           auto out_splits = times(recv_counts, recv.element_size());
           auto in_splits = times(send_counts, send.element_size());
           return group_->alltoall_base(out, in, out_splits, in_splits,
                                        options_for<c10d::AllToAllOptions>(recv));
         }},
        unit);
  }

  void all_reduce(at::Tensor tensor, ReduceOp op, const std::string& unit) override {
    require_dense(tensor, unit);
    const int64_t bytes = tensor.nbytes();
    run({Op::all_reduce, -1, bytes, traffic_.all_reduce(bytes),
         [&] {
           std::vector<at::Tensor> tensors{tensor};
           auto options = options_for<c10d::AllreduceOptions>(tensor);
           options.reduceOp = op == ReduceOp::sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
           return group_->allreduce(tensors, options);
         }},
        unit);
  }

  void all_gather(at::Tensor out, at::Tensor in, const std::string& unit) override {
    require_gather(out, in, size(), unit);
    if (size() == 1) out.view({-1}).copy_(in.view({-1}));
    const int64_t bytes = in.nbytes();
    run({Op::all_gather, -1, bytes, traffic_.all_gather(bytes),
         [&] {
           at::Tensor to = as_bytes(out), from = as_bytes(in);
           return group_->_allgather_base(to, from, options_for<c10d::AllgatherOptions>(in));
         }},
        unit);
  }

  void abort(const std::string& reason) override {
    close("aborted: " + reason);
    try {
      group_->abort();
    } catch (const std::exception&) {  // the reason is what matters, not how the backend took it
    }
  }

 private:
  Call broadcast_call(const Broadcast& part) const {
    const int64_t bytes = part.tensor.nbytes();
    return {Op::broadcast, part.root, bytes, traffic_.broadcast(part.root, bytes), [this, &part] {
              std::vector<at::Tensor> tensors{as_bytes(part.tensor)};
              auto options = options_for<c10d::BroadcastOptions>(part.tensor);
              options.rootRank = part.root;
              return group_->broadcast(tensors, options);
            }};
  }

  void run(Call call, const std::string& unit) {
    std::vector<Call> calls;
    calls.push_back(std::move(call));
    run(calls, unit);
  }

  // Issues all, then waits for all.
  void run(std::vector<Call>& calls, const std::string& unit) {
    require_open(unit);
    if (size() == 1) return;
    size_t at = 0;
    try {
      for (at = 0; at < calls.size(); ++at) issue(calls[at], unit);
      for (at = 0; at < calls.size(); ++at) finish(calls[at]);
    } catch (const std::exception& failure) {
      fail(calls, calls[at], unit, text_of(failure));
    }
  }

  void issue(Call& call, const std::string& unit) {
    if (ring_) call.sequence = ring_->begin(call.op, unit, call.root, call.sent_bytes);
    call.work = call.issue();
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
    throw RuntimeFailure(closed_reason());
  }

  void close(const std::string& reason) {
    std::lock_guard lock(mutex_);
    closed_ += (closed_.empty() ? "" : "; ") + reason;
  }

  std::string closed_reason() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }

  void require_open(const std::string& unit) const {
    const std::string reason = closed_reason();
    if (reason.empty()) return;
    throw RuntimeFailure(message("'", unit, "': this group is closed since ", reason));
  }

  const Group group_;
  FlightRing* const ring_;
  const Traffic traffic_;
  mutable std::mutex mutex_;
  std::string closed_;
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

std::unique_ptr<Transport> make_c10d_transport(const std::string& group_name, FlightRing* ring) {
  return make_c10d_transport(resolve(group_name), ring);
}

std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                               FlightRing* ring) {
  return std::make_unique<C10dTransport>(std::move(group), ring);
}

}  // namespace dmuon

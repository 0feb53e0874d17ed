#include <cmath>
#include <numeric>
#include <utility>

#include "engine/lane.h"
#include "engine/traffic.h"
#include "engine/transport_checks.h"
#include "tests/support/sim_world.h"

namespace dmuon::testing {
namespace {

int64_t bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

std::string described(const at::Tensor& tensor) {
  return message(tensor.numel(), " x ", tensor.scalar_type());
}

// The part of `flat` that belongs to `rank`.
at::Tensor slice(const at::Tensor& tensor, const std::vector<int64_t>& counts, int rank) {
  const int64_t start = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
  return tensor.view({-1}).narrow(0, start, counts[rank]);
}

void broadcast_all(Parts& ranks, const std::vector<int>& roots) {
  for (size_t i = 0; i < roots.size(); ++i) {
    for (Part& part : ranks) {
      if (&part != &ranks[roots[i]]) part.tensors[i].copy_(ranks[roots[i]].tensors[i]);
    }
  }
}

void exchange_all(Parts& ranks) {
  const int size = static_cast<int>(ranks.size());
  for (int to = 0; to < size; ++to) {
    for (int from = 0; from < size; ++from) {
      slice(ranks[to].tensors[0], ranks[to].receives, from)
          .copy_(slice(ranks[from].tensors[1], ranks[from].sends, to));
    }
  }
}

// Left to right over the ranks: a result does not depend on who arrived last.
void reduce_all(Parts& ranks, ReduceOp op) {
  at::Tensor result = ranks[0].tensors[0].clone();
  for (size_t i = 1; i < ranks.size(); ++i) {
    const at::Tensor& other = ranks[i].tensors[0];
    if (op == ReduceOp::sum) {
      result.add_(other);
    } else {
      result.copy_(result.maximum(other));
    }
  }
  for (Part& part : ranks) part.tensors[0].copy_(result);
}

void gather_all(Parts& ranks) {
  const int64_t count = ranks[0].tensors[1].numel();
  for (Part& part : ranks) {
    for (size_t from = 0; from < ranks.size(); ++from) {
      part.tensors[0]
          .view({-1})
          .narrow(0, from * count, count)
          .copy_(ranks[from].tensors[1].view({-1}));
    }
  }
}

class EventPending final : public Pending {
 public:
  explicit EventPending(Event event) : event_(std::move(event)) {}
  void wait() override { event_.wait(); }

 private:
  const Event event_;
};

class SimTransport final : public Transport {
 public:
  SimTransport(std::shared_ptr<SimWorld::State> world, Seat seat, Channel channel, FlightRing* ring)
      : world_(std::move(world)),
        seat_(std::move(seat)),
        channel_(channel),
        ring_(ring),
        traffic_{seat_.rank, seat_.size} {
    world_->join(seat_);
  }
  // Frees the ranks that wait, and so what is in flight here.
  ~SimTransport() override { world_->leave(seat_); }

  int rank() const override { return traffic_.rank; }
  int size() const override { return traffic_.size; }

  void broadcast(const std::vector<Broadcast>& parts, const std::string& unit) override {
    Part part{message("broadcast '", unit, "'"), {}, {}, {}};
    std::vector<int> roots;
    std::vector<Record> records;
    for (const Broadcast& one : parts) {
      require_dense(one.tensor, unit);
      require_root(one.root, size(), unit);
      part.what += message(" [", described(one.tensor), " from rank ", one.root, "]");
      part.tensors.push_back(one.tensor);
      roots.push_back(one.root);
      records.push_back({Op::broadcast, one.root, traffic_.broadcast(one.root, bytes(one.tensor))});
    }
    run(std::move(part), unit, records, [&](Parts& ranks) { broadcast_all(ranks, roots); });
  }

  void exchange(at::Tensor recv, const std::vector<int64_t>& recv_counts, at::Tensor send,
                const std::vector<int64_t>& send_counts, const std::string& unit) override {
    if (in_flight_) in_flight_->record().wait();
    exchange_now(recv, recv_counts, send, send_counts, unit);
  }

  std::unique_ptr<Pending> start_exchange(at::Tensor recv, const std::vector<int64_t>& recv_counts,
                                          at::Tensor send, const std::vector<int64_t>& send_counts,
                                          const std::string& unit) override {
    if (!in_flight_) in_flight_ = make_host_lane(seat_.group);
    if (recv.is_floating_point()) recv.detach().fill_(NAN);
    return std::make_unique<EventPending>(in_flight_->submit(
        [=, this] { exchange_now(recv, recv_counts, send, send_counts, unit); }));
  }

  void all_reduce(at::Tensor tensor, ReduceOp op, const std::string& unit) override {
    require_dense(tensor, unit);
    const char* how = op == ReduceOp::sum ? "sum" : "max";
    run({message("all_reduce ", how, " '", unit, "' of ", described(tensor)), {tensor}, {}, {}},
        unit, {{Op::all_reduce, -1, traffic_.all_reduce(bytes(tensor))}},
        [op](Parts& ranks) { reduce_all(ranks, op); });
  }

  void all_gather(at::Tensor out, at::Tensor in, const std::string& unit) override {
    require_gather(out, in, size(), unit);
    if (size() == 1) out.view({-1}).copy_(in.view({-1}));
    run({message("all_gather '", unit, "' of ", described(in)), {out, in}, {}, {}}, unit,
        {{Op::all_gather, -1, traffic_.all_gather(bytes(in))}}, gather_all);
  }

  void abort(const std::string& reason) override { world_->abort(seat_, reason); }

 private:
  struct Record {
    Op op;
    int root;
    int64_t sent_bytes;
  };

  void exchange_now(const at::Tensor& recv, const std::vector<int64_t>& recv_counts,
                    const at::Tensor& send, const std::vector<int64_t>& send_counts,
                    const std::string& unit) {
    require_exchange(recv, recv_counts, send, send_counts, rank(), size(), unit);
    meet({message("exchange '", unit, "' of ", send.scalar_type()),
          {recv, send},
          send_counts,
          recv_counts},
         unit, {{Op::exchange, -1, bytes(send)}}, exchange_all);
  }

  // In the order of the calls.
  void run(Part part, const std::string& unit, const std::vector<Record>& records,
           const Combine& combine) {
    if (in_flight_) in_flight_->record().wait();
    meet(std::move(part), unit, records, combine);
  }

  void meet(Part part, const std::string& unit, const std::vector<Record>& records,
            const Combine& combine) {
    if (size() == 1) return;
    std::vector<int64_t> sequences;
    for (const Record& record : records) {
      if (!ring_) break;
      sequences.push_back(ring_->begin(record.op, unit, record.root, record.sent_bytes, channel_));
    }
    try {
      world_->meet(seat_, std::move(part), combine);
    } catch (...) {
      for (int64_t sequence : sequences) ring_->end(sequence, OpState::failed);
      throw;
    }
    for (int64_t sequence : sequences) ring_->end(sequence, OpState::done);
  }

  const std::shared_ptr<SimWorld::State> world_;
  const Seat seat_;
  const Channel channel_;
  FlightRing* const ring_;
  const Traffic traffic_;
  std::unique_ptr<Lane> in_flight_;  // from the first start_exchange on
};

Seat seat_of(int world_rank, const SimGroup& group, int world_size) {
  const auto& members = group.members;
  if (members.empty()) return {group.name, group.name, world_size, world_rank, world_rank};
  Seat seat{group.name, group.name, static_cast<int>(members.size()), 0, world_rank};
  seat.rank = static_cast<int>(std::ranges::find(members, world_rank) - members.begin());
  if (seat.size == world_size) return seat;
  for (const int member : members) seat.group += message(" ", member);
  return seat;
}

}  // namespace

std::unique_ptr<Transport> SimWorld::transport(int rank, const SimGroup& group, FlightRing* ring) {
  return std::make_unique<SimTransport>(state_, seat_of(rank, group, size()), group.channel, ring);
}

}  // namespace dmuon::testing

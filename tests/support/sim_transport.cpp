#include "tests/support/sim_transport.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

#include "engine/task_scope.h"
#include "engine/traffic.h"
#include "engine/transport_checks.h"

namespace dmuon::testing {
namespace {

using Lock = std::unique_lock<std::mutex>;
using Place = std::tuple<std::string, int, int64_t>;  // group, rank, index

// What one rank brings to an operation.
struct Part {
  std::string what;
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> sends, receives;  // exchange only
};
using Parts = std::vector<Part>;
using Combine = std::function<void(Parts&)>;

// The meeting place of one group. The last rank to arrive checks, and works on everybody's tensors.
struct Group {
  explicit Group(int size) : parts(size), arrived(size), left(size), indices(size) {}

  std::condition_variable changed;
  Parts parts;
  std::vector<bool> arrived, left;
  std::vector<int64_t> indices;  // of each rank's next operation
  int64_t round = 0;

  // For good, and for all ranks that have not left `failed_round` behind.
  std::string failure;
  int64_t failed_round = 0;
  bool freed = false;  // the failure is another rank's

  void fail(const std::string& reason, bool frees) {
    if (failure.empty()) {
      failure = reason;
      failed_round = round;
      freed = frees;
    }
    changed.notify_all();
  }

  void throw_if_failed(int64_t at_round) const {
    if (failure.empty() || at_round < failed_round) return;
    if (freed) throw PeerFailure(failure);
    throw RuntimeFailure(failure);
  }

  bool anyone_waits() const { return std::ranges::count(arrived, true) > 0; }
  bool complete() const { return std::ranges::count(arrived, false) == 0; }
};

// The ranks that say the same, for a message: "ranks 0, 2".
std::string ranks_that_say(const Parts& parts, const std::string& what) {
  std::string ranks;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].what == what) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return (ranks.find(',') == std::string::npos ? "rank " : "ranks ") + ranks;
}

std::string disagreement(const Parts& parts) {
  const auto other =
      std::ranges::find_if(parts, [&](const Part& part) { return part.what != parts[0].what; });
  if (other == parts.end()) return "";
  return message("ranks disagree: ", ranks_that_say(parts, parts[0].what), " calls ", parts[0].what,
                 "; ", ranks_that_say(parts, other->what), " calls ", other->what);
}

std::string uneven_exchange(const Parts& parts) {
  const int size = static_cast<int>(parts.size());
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size && !parts[from].sends.empty(); ++to) {
      if (parts[from].sends[to] == parts[to].receives[from]) continue;
      return message("ranks disagree: in ", parts[from].what, " rank ", from, " sends ",
                     parts[from].sends[to], " elements to rank ", to, ", which receives ",
                     parts[to].receives[from]);
    }
  }
  return "";
}

}  // namespace

struct SimWorld::State {
  explicit State(int size) : size(size) {}

  Group& group(const std::string& name) { return groups.try_emplace(name, size).first->second; }

  // Blocks until all ranks of the group have brought their part and `combine` has worked on them.
  void meet(const std::string& name, int rank, Part part, const Combine& combine);
  void abort(const std::string& name, int rank, const std::string& reason);
  void join(const std::string& name, int rank);
  void leave(const std::string& name, int rank);

  const int size;
  std::mutex mutex;  // of everything here
  std::map<std::string, Group> groups;
  std::map<Place, std::chrono::microseconds> delays;
  std::map<Place, std::string> failures;
  std::optional<std::mt19937_64> random;
  std::vector<SimOperation> log;

 private:
  std::chrono::microseconds delay_at(const Place& place);
  void arrive(Lock& lock, const std::string& name, int rank);
  void finish_round(const std::string& name, Group& group, const Combine& combine);
};

std::chrono::microseconds SimWorld::State::delay_at(const Place& place) {
  const auto& [group, rank, index] = place;
  std::chrono::microseconds delay(random ? (*random)() % 200 : 0);
  for (int late : {-1, rank}) {
    const auto found = delays.find({group, late, index});
    if (found != delays.end()) delay += found->second;
  }
  return delay;
}

// Late, if so asked; or not at all.
void SimWorld::State::arrive(Lock& lock, const std::string& name, int rank) {
  Group& group = this->group(name);
  const Place place{name, rank, group.indices[rank]++};
  const auto delay = delay_at(place);
  if (delay.count() > 0) {
    lock.unlock();
    std::this_thread::sleep_for(delay);
    lock.lock();
  }
  if (const auto failing = failures.find(place); failing != failures.end()) {
    group.fail(message("group '", name, "': rank ", rank, " failed: ", failing->second), true);
    throw RuntimeFailure(failing->second);
  }
  group.throw_if_failed(group.round);
}

void SimWorld::State::finish_round(const std::string& name, Group& group, const Combine& combine) {
  std::string wrong = disagreement(group.parts);
  if (wrong.empty()) wrong = uneven_exchange(group.parts);
  if (wrong.empty()) {
    log.push_back({name, group.round, group.parts[0].what});
    TaskScope scope;
    combine(group.parts);
  } else {
    group.fail(message("operation ", group.round, " of group '", name, "': ", wrong), false);
  }
  group.parts.assign(size, {});
  group.arrived.assign(size, false);
  ++group.round;
  group.changed.notify_all();
}

void SimWorld::State::meet(const std::string& name, int rank, Part part, const Combine& combine) {
  Lock lock(mutex);
  arrive(lock, name, rank);
  Group& group = this->group(name);
  group.parts[rank] = std::move(part);
  group.arrived[rank] = true;
  const int64_t round = group.round;
  for (int other = 0; other < size; ++other) {
    if (group.left[other])
      group.fail(message("group '", name, "': rank ", other, " has left"), true);
  }
  if (group.complete()) finish_round(name, group, combine);
  group.changed.wait(lock, [&] { return group.round != round || !group.failure.empty(); });
  group.throw_if_failed(round);
}

void SimWorld::State::abort(const std::string& name, int rank, const std::string& reason) {
  Lock lock(mutex);
  group(name).fail(message("group '", name, "': rank ", rank, " aborted: ", reason), true);
}

void SimWorld::State::join(const std::string& name, int rank) {
  Lock lock(mutex);
  group(name).left[rank] = false;
}

void SimWorld::State::leave(const std::string& name, int rank) {
  Lock lock(mutex);
  Group& group = this->group(name);
  group.left[rank] = true;
  if (!group.anyone_waits()) return;
  group.fail(message("group '", name, "': rank ", rank, " has left"), true);
}

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

class SimTransport final : public Transport {
 public:
  SimTransport(std::shared_ptr<SimWorld::State> world, int rank, std::string name, FlightRing* ring)
      : world_(std::move(world)),
        name_(std::move(name)),
        ring_(ring),
        traffic_{rank, world_->size} {
    world_->join(name_, rank);
  }
  ~SimTransport() override { world_->leave(name_, rank()); }

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
    require_exchange(recv, recv_counts, send, send_counts, rank(), size(), unit);
    run({message("exchange '", unit, "' of ", send.scalar_type()),
         {recv, send},
         send_counts,
         recv_counts},
        unit, {{Op::exchange, -1, bytes(send)}}, exchange_all);
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

  void abort(const std::string& reason) override { world_->abort(name_, rank(), reason); }

 private:
  struct Record {
    Op op;
    int root;
    int64_t sent_bytes;
  };

  void run(Part part, const std::string& unit, const std::vector<Record>& records,
           const Combine& combine) {
    if (size() == 1) return;
    std::vector<int64_t> sequences;
    for (const Record& record : records) {
      if (ring_) sequences.push_back(ring_->begin(record.op, unit, record.root, record.sent_bytes));
    }
    try {
      world_->meet(name_, rank(), std::move(part), combine);
    } catch (...) {
      for (int64_t sequence : sequences) ring_->end(sequence, OpState::failed);
      throw;
    }
    for (int64_t sequence : sequences) ring_->end(sequence, OpState::done);
  }

  const std::shared_ptr<SimWorld::State> world_;
  const std::string name_;
  FlightRing* const ring_;
  const Traffic traffic_;
};

}  // namespace

SimWorld::SimWorld(int size) : state_(std::make_shared<State>(size)) {}
SimWorld::~SimWorld() = default;

int SimWorld::size() const { return state_->size; }

std::unique_ptr<Transport> SimWorld::transport(int rank, const std::string& name,
                                               FlightRing* ring) {
  return std::make_unique<SimTransport>(state_, rank, name, ring);
}

void SimWorld::delay(const std::string& group, int64_t index, std::chrono::microseconds by,
                     int rank) {
  Lock lock(state_->mutex);
  state_->delays[{group, rank, index}] += by;
}

void SimWorld::fail(int rank, int64_t nth, const std::string& message, const std::string& group) {
  Lock lock(state_->mutex);
  state_->failures[{group, rank, nth}] = message;
}

void SimWorld::reorder(uint64_t seed) {
  Lock lock(state_->mutex);
  state_->random.emplace(seed);
}

std::vector<SimOperation> SimWorld::log() const {
  Lock lock(state_->mutex);
  return state_->log;
}

void run_ranks(int size, const std::function<void(int rank)>& body) {
  std::mutex mutex;
  std::exception_ptr failure, echo;  // the first of each
  const auto keep = [&](std::exception_ptr& first) {
    std::lock_guard lock(mutex);
    if (!first) first = std::current_exception();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const PeerFailure&) {
        keep(echo);
      } catch (...) {
        keep(failure);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  if (echo) std::rethrow_exception(echo);
}

}  // namespace dmuon::testing

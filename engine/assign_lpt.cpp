#include <algorithm>
#include <bit>

#include "engine/assign_state.h"

namespace dmuon::assign {
namespace {

// Takes the cheapest slot for each matrix of one cost. Slots are taken in rising order, so those
// that got a matrix come back in rising order too: two queues replace a heap.
class EqualCosts {
 public:
  explicit EqualCosts(int64_t slots) : waiting_(empty_loads(slots)) {}

  void assign(const int32_t* items, size_t count, double cost, std::vector<int32_t>& owners) {
    size_t waiting = 0, taken = 0;
    taken_.clear();
    for (size_t i = 0; i < count; ++i) {
      const bool again = waiting == waiting_.size() ||
                         (taken < taken_.size() && taken_[taken] < waiting_[waiting]);
      const Load slot = again ? taken_[taken++] : waiting_[waiting++];
      owners[items[i]] = slot.index;
      taken_.push_back({slot.load + cost, slot.count + 1, slot.index});
    }
    merge(waiting, taken);
  }

 private:
  void merge(size_t waiting, size_t taken) {
    merged_.resize(waiting_.size());
    std::merge(waiting_.begin() + static_cast<std::ptrdiff_t>(waiting), waiting_.end(),
               taken_.begin() + static_cast<std::ptrdiff_t>(taken), taken_.end(), merged_.begin());
    waiting_.swap(merged_);
  }

  std::vector<Load> waiting_, taken_, merged_;
};

// A heap of slots whose first is the cheapest.
class CheapestSlot {
 public:
  explicit CheapestSlot(int64_t slots) : heap_(empty_loads(slots)) {}

  int32_t take(double cost) {
    Load slot = heap_.front();
    const int32_t index = slot.index;
    slot.load += cost;
    ++slot.count;
    sink(slot);
    return index;
  }

 private:
  void sink(const Load& slot) {
    size_t hole = 0;
    for (size_t child = 1; child < heap_.size(); child = 2 * hole + 1) {
      if (child + 1 < heap_.size()) child += heap_[child + 1] < heap_[child];
      if (!(heap_[child] < slot)) break;
      heap_[hole] = heap_[child];
      hole = child;
    }
    heap_[hole] = slot;
  }

  std::vector<Load> heap_;
};

std::vector<size_t> run_starts(const AssignProblem& problem, const std::vector<int32_t>& order) {
  std::vector<size_t> starts;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || problem.costs[order[i]] != problem.costs[order[i - 1]]) starts.push_back(i);
  }
  return starts;
}

}  // namespace

std::vector<int32_t> plain_lpt(const AssignProblem& problem, const std::vector<int32_t>& order) {
  const std::vector<size_t> starts = run_starts(problem, order);
  const size_t levels = std::bit_width(static_cast<uint64_t>(problem.slots));
  std::vector<int32_t> owners(order.size());
  if (starts.size() * static_cast<size_t>(problem.slots) > 4 * levels * order.size()) {
    CheapestSlot cheapest(problem.slots);
    for (int32_t item : order) owners[item] = cheapest.take(problem.costs[item]);
    return owners;
  }
  EqualCosts queues(problem.slots);
  for (size_t run = 0; run < starts.size(); ++run) {
    const size_t end = run + 1 < starts.size() ? starts[run + 1] : order.size();
    const double cost = problem.costs[order[starts[run]]];
    queues.assign(&order[starts[run]], end - starts[run], cost, owners);
  }
  return owners;
}

}  // namespace dmuon::assign

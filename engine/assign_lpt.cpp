#include <algorithm>
#include <bit>
#include <set>
#include <tuple>

#include "engine/assign_state.h"

namespace dmuon::assign {
namespace {

struct Slot {
  double load = 0;
  int32_t count = 0;
  int32_t index = 0;
  bool operator<(const Slot& other) const {
    return std::tie(load, count, index) < std::tie(other.load, other.count, other.index);
  }
};

std::vector<Slot> empty_slots(int64_t count) {
  std::vector<Slot> slots(count);
  for (int64_t i = 0; i < count; ++i) slots[i].index = static_cast<int32_t>(i);
  return slots;
}

// Takes the cheapest slot for each matrix of one cost. Slots are taken in rising order, so those
// that got a matrix come back in rising order too: two queues replace a heap.
class EqualCosts {
 public:
  explicit EqualCosts(int64_t slots) : waiting_(empty_slots(slots)) {}

  void assign(const int32_t* items, size_t count, double cost, std::vector<int32_t>& owners) {
    size_t waiting = 0, taken = 0;
    taken_.clear();
    for (size_t i = 0; i < count; ++i) {
      const bool again = waiting == waiting_.size() ||
                         (taken < taken_.size() && taken_[taken] < waiting_[waiting]);
      const Slot slot = again ? taken_[taken++] : waiting_[waiting++];
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

  std::vector<Slot> waiting_, taken_, merged_;
};

// A heap of slots whose first is the cheapest.
class CheapestSlot {
 public:
  explicit CheapestSlot(int64_t slots) : heap_(empty_slots(slots)) {}

  int32_t take(double cost) {
    Slot slot = heap_.front();
    const int32_t index = slot.index;
    slot.load += cost;
    ++slot.count;
    sink(slot);
    return index;
  }

 private:
  void sink(const Slot& slot) {
    size_t hole = 0;
    for (size_t child = 1; child < heap_.size(); child = 2 * hole + 1) {
      if (child + 1 < heap_.size()) child += heap_[child + 1] < heap_[child];
      if (!(heap_[child] < slot)) break;
      heap_[hole] = heap_[child];
      hole = child;
    }
    heap_[hole] = slot;
  }

  std::vector<Slot> heap_;
};

std::vector<size_t> run_starts(const AssignProblem& problem, const std::vector<int32_t>& order) {
  std::vector<size_t> starts;
  for (size_t i = 0; i < order.size(); ++i) {
    if (i == 0 || problem.costs[order[i]] != problem.costs[order[i - 1]]) starts.push_back(i);
  }
  return starts;
}

// Slots with what is left on them, cheapest first, and the slots of each unit.
class LimitedSlots {
 public:
  explicit LimitedSlots(const AssignProblem& problem)
      : problem_(problem), slots_(empty_slots(problem.slots)), bytes_(problem.slots) {
    cheapest_.insert(slots_.begin(), slots_.end());
    smallest_ = *std::min_element(problem.bytes.begin(), problem.bytes.end());
    if (problem.max_owners > 0) {
      of_unit_.resize(1 + *std::max_element(problem.units.begin(), problem.units.end()));
    }
  }

  // The slot, or kNone where no slot may take it.
  int32_t take(int32_t item, double weight) {
    const int32_t index = unit_is_full(item) ? cheapest_of_unit(item) : cheapest(item);
    if (index == kNone) return kNone;
    Slot& slot = slots_[index];
    cheapest_.erase(slot);
    slot.load += weight;
    ++slot.count;
    bytes_[index] += problem_.bytes[item];
    if (has_room(index, smallest_)) cheapest_.insert(slot);
    remember(item, index);
    return index;
  }

 private:
  bool has_room(int32_t slot, int64_t bytes) const {
    return problem_.memory_limit == 0 || bytes_[slot] + bytes <= problem_.memory_limit;
  }

  bool fits(int32_t item, int32_t slot) const { return has_room(slot, problem_.bytes[item]); }

  bool unit_is_full(int32_t item) const {
    return problem_.max_owners > 0 &&
           static_cast<int64_t>(of_unit_[problem_.units[item]].size()) >= problem_.max_owners;
  }

  int32_t cheapest(int32_t item) const {
    for (const Slot& slot : cheapest_) {
      if (fits(item, slot.index)) return slot.index;
    }
    return kNone;
  }

  int32_t cheapest_of_unit(int32_t item) const {
    int32_t best = kNone;
    for (int32_t slot : of_unit_[problem_.units[item]]) {
      if (fits(item, slot) && (best == kNone || slots_[slot] < slots_[best])) best = slot;
    }
    return best;
  }

  void remember(int32_t item, int32_t slot) {
    if (problem_.max_owners == 0) return;
    std::vector<int32_t>& owners = of_unit_[problem_.units[item]];
    if (std::find(owners.begin(), owners.end(), slot) == owners.end()) owners.push_back(slot);
  }

  const AssignProblem& problem_;
  std::vector<Slot> slots_;
  std::vector<int64_t> bytes_;
  int64_t smallest_ = 0;
  std::set<Slot> cheapest_;  // without those that have no room for the smallest matrix
  std::vector<std::vector<int32_t>> of_unit_;
};

// Empty where a matrix finds no slot.
template <class Weight>
std::vector<int32_t> try_limited(const AssignProblem& problem, const std::vector<int32_t>& order,
                                 Weight weight) {
  LimitedSlots slots(problem);
  std::vector<int32_t> owners(order.size());
  for (int32_t item : order) {
    owners[item] = slots.take(item, weight(item));
    if (owners[item] == kNone) return {};
  }
  return owners;
}

std::vector<int32_t> by_falling_bytes(const AssignProblem& problem) {
  std::vector<int32_t> order(problem.bytes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return problem.bytes[a] > problem.bytes[b]; });
  return order;
}

// Passes over slots in turn, and over those that may not take the matrix.
class Turns {
 public:
  explicit Turns(const AssignProblem& problem)
      : problem_(problem),
        bytes_(problem.slots),
        of_unit_(1 + *std::max_element(problem.units.begin(), problem.units.end())) {}

  // The slot, or kNone where no slot may take it.
  int32_t take(int32_t item) {
    for (int64_t tried = 0; tried < problem_.slots; ++tried) {
      const int32_t slot = static_cast<int32_t>((next_ + tried) % problem_.slots);
      if (!may_take(item, slot)) continue;
      bytes_[slot] += problem_.bytes[item];
      of_unit_[problem_.units[item]].insert(slot);
      next_ = slot + 1;
      return slot;
    }
    return kNone;
  }

 private:
  bool may_take(int32_t item, int32_t slot) const {
    const std::set<int32_t>& owners = of_unit_[problem_.units[item]];
    const bool room =
        problem_.memory_limit == 0 || bytes_[slot] + problem_.bytes[item] <= problem_.memory_limit;
    return room && (problem_.max_owners == 0 || owners.contains(slot) ||
                    static_cast<int64_t>(owners.size()) < problem_.max_owners);
  }

  const AssignProblem& problem_;
  std::vector<int64_t> bytes_;
  std::vector<std::set<int32_t>> of_unit_;
  int64_t next_ = 0;
};

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

std::vector<int32_t> limited_lpt(const AssignProblem& problem, const std::vector<int32_t>& order) {
  auto cost = [&](int32_t item) { return problem.costs[item]; };
  auto bytes = [&](int32_t item) { return static_cast<double>(problem.bytes[item]); };
  std::vector<int32_t> owners = try_limited(problem, order, cost);
  if (owners.empty()) owners = try_limited(problem, by_falling_bytes(problem), bytes);
  if (owners.empty() && problem.max_owners == 0) owners = pack_bytes(problem);
  return owners;
}

std::vector<int32_t> limited_round_robin(const AssignProblem& problem) {
  Turns turns(problem);
  std::vector<int32_t> owners(problem.size());
  for (int32_t item = 0; item < problem.size(); ++item) {
    owners[item] = turns.take(item);
    if (owners[item] == kNone) return {};
  }
  return owners;
}

}  // namespace dmuon::assign

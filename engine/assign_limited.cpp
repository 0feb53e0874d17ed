#include <algorithm>
#include <numeric>
#include <set>

#include "engine/assign_state.h"

namespace dmuon::assign {
namespace {

// What one matrix adds to its slot, and to every slot of its cell.
struct Weight {
  double own = 0, everywhere = 0;
};

Weight cost_of(const AssignProblem& problem, int32_t item) {
  const double cost = problem.costs[item];
  return problem.is_shared(item) ? Weight{0, cost} : Weight{cost, 0};
}

Weight bytes_of(const AssignProblem& problem, int32_t item) {
  const int64_t everywhere = problem.cell_bytes.empty() ? 0 : problem.cell_bytes[item];
  return {static_cast<double>(problem.bytes[item]), static_cast<double>(everywhere)};
}

// The cells that hold matrices of each unit, under an owner limit.
class UnitCells {
 public:
  explicit UnitCells(const AssignProblem& problem) : problem_(problem) {
    if (problem.max_owners == 0) return;
    cells_.resize(1 + *std::max_element(problem.units.begin(), problem.units.end()));
  }

  const std::vector<int32_t>& of(int32_t item) const { return cells_[problem_.units[item]]; }

  bool is_full(int32_t item) const {
    return problem_.max_owners > 0 && static_cast<int64_t>(of(item).size()) >= problem_.max_owners;
  }

  bool allows(int32_t item, int32_t cell) const {
    return !is_full(item) || std::find(of(item).begin(), of(item).end(), cell) != of(item).end();
  }

  void add(int32_t item, int32_t cell) {
    if (problem_.max_owners == 0) return;
    std::vector<int32_t>& cells = cells_[problem_.units[item]];
    if (std::find(cells.begin(), cells.end(), cell) == cells.end()) cells.push_back(cell);
  }

 private:
  const AssignProblem& problem_;
  std::vector<std::vector<int32_t>> cells_;
};

// Slots and cells with what is left on them, cheapest first.
class LimitedSlots {
 public:
  explicit LimitedSlots(const AssignProblem& problem)
      : problem_(problem),
        cells_(static_cast<int32_t>(problem.cell_count())),
        slots_(empty_loads(problem.slots)),
        memory_(problem),
        unit_cells_(problem),
        cheapest_(slots_.begin(), slots_.end()),
        smallest_(*std::min_element(problem.bytes.begin(), problem.bytes.end())) {
    if (problem.shared.empty()) return;
    tops_ = empty_loads(cells_);
    cheapest_cells_.insert(tops_.begin(), tops_.end());
  }

  // The slot, or kNone where no slot may take it.
  int32_t take(int32_t item, const Weight& weight) {
    const int32_t slot = choose(item);
    if (slot != kNone) place(item, slot, weight);
    return slot;
  }

  void place(int32_t item, int32_t slot, const Weight& weight) {
    const int32_t cell = problem_.cell(slot);
    memory_.add(item, slot);
    unit_cells_.add(item, cell);
    if (problem_.is_shared(item) || weight.everywhere > 0) {
      for (int32_t other = cell; other < problem_.slots; other += cells_) {
        if (other != slot) raise(other, weight.everywhere, problem_.is_shared(item));
      }
    }
    raise(slot, weight.own + weight.everywhere, 1);
  }

 private:
  int32_t choose(int32_t item) const {
    if (unit_cells_.is_full(item)) return cheapest_of_unit(item);
    return first_that_fits(problem_.is_shared(item) ? cheapest_cells_ : cheapest_, item);
  }

  int32_t first_that_fits(const std::set<Load>& loads, int32_t item) const {
    for (const Load& load : loads) {
      if (memory_.fits(item, load.index)) return load.index;
    }
    return kNone;
  }

  int32_t cheapest_of_unit(int32_t item) const {
    const std::vector<Load>& loads = problem_.is_shared(item) ? tops_ : slots_;
    int32_t best = kNone;
    for (const int32_t cell : unit_cells_.of(item)) {
      for (int32_t i = cell; i < static_cast<int32_t>(loads.size()); i += cells_) {
        if (memory_.fits(item, i) && (best == kNone || loads[i] < loads[best])) best = i;
      }
    }
    return best;
  }

  void raise(int32_t index, double load, int32_t count) {
    Load& slot = slots_[index];
    cheapest_.erase(slot);
    slot.load += load;
    slot.count += count;
    if (memory_.has_room(index, smallest_)) cheapest_.insert(slot);
    if (!tops_.empty()) raise_top(problem_.cell(index), slot.load, count);
  }

  void raise_top(int32_t cell, double load, int32_t count) {
    Load& top = tops_[cell];
    cheapest_cells_.erase(top);
    top.load = std::max(top.load, load);
    top.count += count;
    cheapest_cells_.insert(top);
  }

  const AssignProblem& problem_;
  int32_t cells_;
  std::vector<Load> slots_;
  std::vector<Load> tops_;  // per cell: its costliest slot; only where matrices are shared
  Memory memory_;
  UnitCells unit_cells_;
  std::set<Load> cheapest_;  // without those that have no room for the smallest matrix
  std::set<Load> cheapest_cells_;
  int64_t smallest_ = 0;
};

// Empty where a matrix finds no slot.
template <class WeightOf>
std::vector<int32_t> try_limited(const AssignProblem& problem, const std::vector<int32_t>& order,
                                 WeightOf weight_of) {
  LimitedSlots slots(problem);
  std::vector<int32_t> owners(order.size());
  for (int32_t item : order) {
    owners[item] = slots.take(item, weight_of(problem, item));
    if (owners[item] == kNone) return {};
  }
  return owners;
}

std::vector<int32_t> by_falling_bytes(const AssignProblem& problem) {
  std::vector<double> bytes(problem.bytes.size());
  for (int32_t i = 0; i < problem.size(); ++i) {
    const Weight weight = bytes_of(problem, i);
    bytes[i] = weight.own + weight.everywhere;
  }
  std::vector<int32_t> order(bytes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return bytes[a] > bytes[b]; });
  return order;
}

// Passes over slots in turn, and over those that may not take the matrix.
class Turns {
 public:
  explicit Turns(const AssignProblem& problem)
      : problem_(problem), memory_(problem), unit_cells_(problem) {}

  // The slot, or kNone where no slot may take it.
  int32_t take(int32_t item) {
    for (int64_t tried = 0; tried < problem_.slots; ++tried) {
      const int32_t slot = static_cast<int32_t>((next_ + tried) % problem_.slots);
      const int32_t cell = problem_.cell(slot);
      if (!memory_.fits(item, slot) || !unit_cells_.allows(item, cell)) continue;
      memory_.add(item, slot);
      unit_cells_.add(item, cell);
      next_ = slot + 1;
      return slot;
    }
    return kNone;
  }

 private:
  const AssignProblem& problem_;
  Memory memory_;
  UnitCells unit_cells_;
  int64_t next_ = 0;
};

}  // namespace

std::vector<int32_t> limited_lpt(const AssignProblem& problem, const std::vector<int32_t>& order) {
  std::vector<int32_t> owners = try_limited(problem, order, cost_of);
  if (owners.empty() && problem.memory_limit > 0) {
    owners = try_limited(problem, by_falling_bytes(problem), bytes_of);
  }
  if (owners.empty() && problem.max_owners == 0 && problem.shared.empty()) {
    owners = pack_bytes(problem);
  }
  return owners;
}

std::vector<int32_t> place_shared(const AssignProblem& problem, const std::vector<int32_t>& order,
                                  std::vector<int32_t> owners) {
  LimitedSlots slots(problem);
  for (int32_t item : order) {
    if (!problem.is_shared(item)) slots.place(item, owners[item], cost_of(problem, item));
  }
  for (int32_t item : order) {
    if (!problem.is_shared(item)) continue;
    owners[item] = slots.take(item, cost_of(problem, item));
    if (owners[item] == kNone) return {};
  }
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

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/assign_state.h"
#include "engine/order.h"

namespace dmuon::assign {
namespace {

constexpr double kBetter = 1 - 1e-12;
// Beyond these only LPT runs again in a cell: a search is short where there is little to choose.
constexpr int32_t kSearchedList = 1024;
constexpr size_t kSearchedCell = 16;  // searched again and again, up to the optimum mostly
constexpr int kSearches = 16;
constexpr int kSearchedCosts = 8;  // different ones, in a larger cell

template <class T>
std::vector<T> pick(const std::vector<T>& values, const std::vector<int32_t>& items) {
  std::vector<T> picked;
  if (values.empty()) return picked;
  picked.reserve(items.size());
  for (int32_t item : items) picked.push_back(values[item]);
  return picked;
}

AssignProblem subset(const AssignProblem& problem, const std::vector<int32_t>& items) {
  AssignProblem part{.costs = pick(problem.costs, items),
                     .bytes = pick(problem.bytes, items),
                     .cell_bytes = pick(problem.cell_bytes, items),
                     .shared = {},
                     .units = pick(problem.units, items),
                     .layers = pick(problem.layers, items)};
  part.slots = problem.slots;
  part.cells = problem.cells;
  part.memory_limit = problem.memory_limit;
  part.max_owners = problem.max_owners;
  return part;
}

std::vector<int32_t> own_items(const AssignProblem& problem) {
  std::vector<int32_t> items;
  for (int32_t i = 0; i < problem.size(); ++i) {
    if (!problem.is_shared(i)) items.push_back(i);
  }
  return items;
}

// The others where they balance best, then each shared matrix on the cell where it costs least.
std::vector<int32_t> shared_last(const AssignProblem& problem, const std::vector<int32_t>& order) {
  const std::vector<int32_t> items = own_items(problem);
  std::vector<int32_t> owners(problem.size());
  if (!items.empty()) {
    const AssignProblem part = subset(problem, items);
    const std::vector<int32_t> found = lpt_and_search(part, order_descending(part.costs));
    if (found.empty()) return {};
    for (size_t k = 0; k < items.size(); ++k) owners[items[k]] = found[k];
  }
  return place_shared(problem, order, std::move(owners));
}

// The matrices of each cell that are not shared, costliest first.
class ByCell {
 public:
  ByCell(const AssignProblem& problem, const std::vector<int32_t>& order,
         const std::vector<int32_t>& owners)
      : starts_(problem.cell_count() + 1) {
    for (int32_t item : order) {
      if (!problem.is_shared(item)) ++starts_[problem.cell(owners[item]) + 1];
    }
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    items_.resize(starts_.back());
    std::vector<int32_t> next(starts_.begin(), starts_.end() - 1);
    for (int32_t item : order) {
      if (!problem.is_shared(item)) items_[next[problem.cell(owners[item])]++] = item;
    }
  }

  std::vector<int32_t> of(int32_t cell) const {
    return {items_.begin() + starts_[cell], items_.begin() + starts_[cell + 1]};
  }

 private:
  std::vector<int32_t> starts_, items_;
};

// One cell as a problem of its own.
class Cell {
 public:
  // `items` with their costs falling.
  Cell(const AssignProblem& whole, int32_t cell, std::vector<int32_t> items)
      : whole_(whole),
        cell_(cell),
        items_(std::move(items)),
        costs_(pick(whole.costs, items_)),
        tp_(whole.slots / whole.cells) {}

  // LPT, and a search where that is short. `everywhere`: bytes that each slot of the cell holds.
  void lower(std::vector<int32_t>& owners, int64_t everywhere) const {
    if (items_.size() < 2) return;
    const double load = largest_now(owners);
    const std::vector<int32_t> by_lpt = lpt();
    const bool searched = worth_searching() && above_bound(load);
    if (!searched && largest_with(by_lpt) >= load * kBetter) return;
    const AssignProblem part = alone(everywhere);
    std::vector<int32_t> best = slots_in_cell(owners);
    if (largest_with(by_lpt) < load && within_memory(part, by_lpt)) best = by_lpt;
    if (searched) search_on(part, best);
    if (largest_with(best) < load * kBetter) take(best, owners);
  }

 private:
  double largest_now(const std::vector<int32_t>& owners) const {
    return largest_with(slots_in_cell(owners));
  }

  double largest_with(const std::vector<int32_t>& slots) const {
    std::vector<double> loads(tp_);
    for (size_t k = 0; k < slots.size(); ++k) loads[slots[k]] += costs_[k];
    return *std::max_element(loads.begin(), loads.end());
  }

  // A cell has few slots: looking at all of them is faster than a heap.
  std::vector<int32_t> lpt() const {
    std::vector<Load> loads = empty_loads(tp_);
    std::vector<int32_t> slots(costs_.size());
    for (size_t k = 0; k < costs_.size(); ++k) {
      Load& cheapest = *std::min_element(loads.begin(), loads.end());
      cheapest.load += costs_[k];
      ++cheapest.count;
      slots[k] = cheapest.index;
    }
    return slots;
  }

  bool worth_searching() const {
    if (whole_.size() > kSearchedList) return false;
    int different = 1;
    for (size_t i = 1; i < costs_.size(); ++i) different += costs_[i] != costs_[i - 1];
    return items_.size() <= kSearchedCell || different <= kSearchedCosts;
  }

  bool above_bound(double load) const {
    return load > makespan_bound(costs_, falling(), tp_) * (1 + 1e-9);
  }

  AssignProblem alone(int64_t everywhere) const {
    AssignProblem part = subset(whole_, items_);
    part.slots = tp_;
    part.cells = 0;
    part.cell_bytes.clear();
    part.max_owners = 0;
    if (part.memory_limit > 0) {  // nothing left: no matrix has bytes of its own, but 0 is no limit
      part.memory_limit = std::max(part.memory_limit - everywhere, int64_t{1});
    }
    return part;
  }

  std::vector<int32_t> falling() const {
    std::vector<int32_t> order(items_.size());
    std::iota(order.begin(), order.end(), 0);
    return order;
  }

  std::vector<int32_t> slots_in_cell(const std::vector<int32_t>& owners) const {
    std::vector<int32_t> slots = pick(owners, items_);
    for (int32_t& slot : slots) slot = static_cast<int32_t>(slot / whole_.cells);
    return slots;
  }

  // One search stops after a few steps; where it got lower, the next one may get lower still.
  void search_on(const AssignProblem& part, std::vector<int32_t>& best) const {
    const int searches = items_.size() <= kSearchedCell ? kSearches : 1;
    for (int i = 0; i < searches; ++i) {
      const double before = largest_with(best);
      best = search(part, falling(), std::move(best));
      if (largest_with(best) >= before * kBetter) return;
    }
  }

  void take(const std::vector<int32_t>& slots, std::vector<int32_t>& owners) const {
    for (size_t k = 0; k < items_.size(); ++k) {
      owners[items_[k]] = static_cast<int32_t>(slots[k] * whole_.cells + cell_);
    }
  }

  const AssignProblem& whole_;
  int32_t cell_;
  std::vector<int32_t> items_;
  std::vector<double> costs_;
  int64_t tp_ = 1;
};

std::vector<int64_t> bytes_everywhere(const AssignProblem& problem,
                                      const std::vector<int32_t>& owners) {
  std::vector<int64_t> sums(problem.cell_count());
  for (size_t i = 0; i < problem.cell_bytes.size(); ++i) {
    sums[problem.cell(owners[i])] += problem.cell_bytes[i];
  }
  return sums;
}

}  // namespace

std::vector<int32_t> lpt_with_shared(const AssignProblem& problem,
                                     const std::vector<int32_t>& order) {
  std::vector<int32_t> last = shared_last(problem, order);
  std::vector<int32_t> in_order = limited_lpt(problem, order);
  if (last.empty() || in_order.empty()) return last.empty() ? in_order : last;
  return largest_load(problem, in_order) < largest_load(problem, last) * kBetter ? in_order : last;
}

void refine_cells(const AssignProblem& problem, const std::vector<int32_t>& order,
                  std::vector<int32_t>& owners) {
  const ByCell by_cell(problem, order, owners);
  const std::vector<int64_t> everywhere = bytes_everywhere(problem, owners);
  for (int32_t i = 0; i < problem.cells; ++i) {
    Cell(problem, i, by_cell.of(i)).lower(owners, everywhere[i]);
  }
}

}  // namespace dmuon::assign

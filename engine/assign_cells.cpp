#include <algorithm>
#include <numeric>

#include "engine/assign_state.h"
#include "engine/order.h"

namespace dmuon::assign {
namespace {

constexpr double kBetter = 1 - 1e-12;
constexpr int32_t kSearchedList = 2048;  // in longer lists, only LPT runs again in the cells
constexpr int32_t kSearchedCell = 64;

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
  Cell(const AssignProblem& whole, int32_t cell, std::vector<int32_t> items)
      : whole_(whole), cell_(cell), items_(std::move(items)), order_(items_.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    costs_ = pick(whole.costs, items_);
    tp_ = whole.slots / whole.cells;
  }

  bool may_be_lowered(const std::vector<int32_t>& owners) const {
    if (items_.size() < 2) return false;
    std::vector<double> loads(tp_);
    for (int32_t item : items_) loads[owners[item] / whole_.cells] += whole_.costs[item];
    return *std::max_element(loads.begin(), loads.end()) >
           makespan_bound(costs_, order_, tp_) * (1 + 1e-9);
  }

  // `everywhere`: bytes that each slot of the cell holds.
  void lower(std::vector<int32_t>& owners, int64_t everywhere, bool with_search) const {
    AssignProblem part = subset(whole_, items_);
    part.slots = tp_;
    part.cells = 0;
    part.cell_bytes.clear();
    part.max_owners = 0;
    if (part.memory_limit > 0)
      part.memory_limit = std::max<int64_t>(1, part.memory_limit - everywhere);
    std::vector<int32_t> best = pick(owners, items_);
    for (int32_t& slot : best) slot = static_cast<int32_t>(slot / whole_.cells);
    const double load = largest_load(part, best);
    take_lower(part, best, plain_lpt(part, order_));
    if (with_search) best = search(part, order_, std::move(best));
    if (largest_load(part, best) >= load * kBetter) return;
    for (size_t k = 0; k < items_.size(); ++k) {
      owners[items_[k]] = static_cast<int32_t>(best[k] * whole_.cells + cell_);
    }
  }

 private:
  static void take_lower(const AssignProblem& part, std::vector<int32_t>& best,
                         std::vector<int32_t> other) {
    if (!within_memory(part, other)) return;
    if (largest_load(part, other) < largest_load(part, best)) best = std::move(other);
  }

  const AssignProblem& whole_;
  int32_t cell_;
  std::vector<int32_t> items_, order_;
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
    std::vector<int32_t> items = by_cell.of(i);
    const bool with_search =
        problem.size() <= kSearchedList && static_cast<int32_t>(items.size()) <= kSearchedCell;
    const Cell cell(problem, i, std::move(items));
    if (cell.may_be_lowered(owners)) cell.lower(owners, everywhere[i], with_search);
  }
}

}  // namespace dmuon::assign

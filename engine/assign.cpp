#include "engine/assign.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/assign_state.h"
#include "engine/error.h"
#include "engine/order.h"

namespace dmuon {
namespace {

[[noreturn]] void throw_over_memory(const AssignProblem& problem) {
  int64_t largest = 0, total = 0;
  for (int32_t i = 0; i < problem.size(); ++i) {
    const int64_t everywhere = problem.cell_bytes.empty() ? 0 : problem.cell_bytes[i];
    largest = std::max(largest, problem.bytes[i] + everywhere);
    total += problem.bytes[i] + everywhere * (problem.slots / problem.cell_count());
  }
  const int64_t mean = total / problem.slots + (total % problem.slots != 0);
  throw ConfigError(
      message("memory_limit_bytes is ", problem.memory_limit,
              ", and no owners were found that keep it: the ", "largest matrix holds ", largest,
              " bytes of state, all together ", total, " on ", problem.slots,
              " ranks, so at least ", std::max(largest, mean), " are needed",
              problem.max_owners > 0
                  ? message(" (max_owners_per_group = ", problem.max_owners, " can ask for more)")
                  : std::string(),
              ". Raise the limit, add ranks, or select fewer parameters."));
}

template <class T>
std::vector<T> sums(const std::vector<T>& values, const std::vector<int32_t>& owners,
                    int64_t slots) {
  std::vector<T> sum(slots);
  for (size_t i = 0; i < values.size(); ++i) sum[owners[i]] += values[i];
  return sum;
}

// `add` is told of each matrix and may add to its slot and to all slots of its cell.
template <class T, class Add>
std::vector<T> per_slot(const AssignProblem& problem, const std::vector<int32_t>& owners, Add add) {
  std::vector<T> own(problem.slots), everywhere(problem.cell_count());
  for (int32_t i = 0; i < problem.size(); ++i) {
    add(i, own[owners[i]], everywhere[problem.cell(owners[i])]);
  }
  for (int32_t slot = 0; slot < problem.slots; ++slot) own[slot] += everywhere[problem.cell(slot)];
  return own;
}

}  // namespace

namespace assign {

bool within_memory(const AssignProblem& problem, const std::vector<int32_t>& owners) {
  if (problem.memory_limit == 0) return true;
  const std::vector<int64_t> bytes = slot_bytes(problem, owners);
  return *std::max_element(bytes.begin(), bytes.end()) <= problem.memory_limit;
}

double largest_load(const AssignProblem& problem, const std::vector<int32_t>& owners) {
  const std::vector<double> loads = slot_loads(problem, owners);
  return *std::max_element(loads.begin(), loads.end());
}

std::vector<int32_t> lpt_and_search(const AssignProblem& problem,
                                    const std::vector<int32_t>& order) {
  std::vector<int32_t> owners;
  if (problem.max_owners == 0) owners = plain_lpt(problem, order);
  if (owners.empty() || !within_memory(problem, owners)) owners = limited_lpt(problem, order);
  const bool one_each = problem.size() <= problem.slots && !problem.constrained();
  if (owners.empty() || one_each) return owners;
  return search(problem, order, std::move(owners));
}

std::vector<int32_t> search(const AssignProblem& problem, const std::vector<int32_t>& order,
                            std::vector<int32_t> owners) {
  const double bound = makespan_bound(problem.costs, order, problem.slots);
  Slots slots(problem, std::move(owners));
  if (problem.constrained()) fill_idle(slots);
  lower_makespan(slots, bound);
  if (slots.max_load() > bound * (1 + 1e-9)) {
    std::vector<int32_t> better = repack(slots, bound);
    if (!better.empty() && within_memory(problem, better)) {
      slots = Slots(problem, std::move(better));
      fill_idle(slots);
    }
  }
  spread(slots, order);
  return slots.owners();
}

}  // namespace assign

std::vector<int32_t> assign_lpt(const AssignProblem& problem) {
  return assign_lpt(problem, order_descending(problem.costs));
}

std::vector<int32_t> assign_lpt(const AssignProblem& problem, const std::vector<int32_t>& order) {
  std::vector<int32_t> owners = problem.shared.empty() ? assign::lpt_and_search(problem, order)
                                                       : assign::lpt_with_shared(problem, order);
  if (owners.empty()) throw_over_memory(problem);
  if (problem.cell_count() < problem.slots) assign::refine_cells(problem, order, owners);
  return owners;
}

std::vector<int32_t> assign_round_robin(const AssignProblem& problem) {
  std::vector<int32_t> owners(problem.size());
  for (int32_t i = 0; i < problem.size(); ++i) owners[i] = static_cast<int32_t>(i % problem.slots);
  if (!problem.constrained()) return owners;
  owners = assign::limited_round_robin(problem);
  if (owners.empty()) throw_over_memory(problem);
  return owners;
}

double makespan_bound(const std::vector<double>& costs, int64_t slots) {
  return makespan_bound(costs, order_descending(costs), slots);
}

double makespan_bound(const std::vector<double>& costs, const std::vector<int32_t>& order,
                      int64_t slots) {
  if (order.empty()) return 0;
  constexpr int64_t kMost = 64;  // beyond this many on one slot, the mean is as good a bound
  const auto size = static_cast<int64_t>(order.size());
  double bound = std::accumulate(costs.begin(), costs.end(), 0.0) / static_cast<double>(slots);
  for (int64_t k = 0; k < kMost && k * slots < size; ++k) {
    double cheapest = 0;
    for (int64_t i = k * (slots - 1); i <= k * slots; ++i) cheapest += costs[order[i]];
    bound = std::max(bound, cheapest);
  }
  return bound;
}

double makespan_bound(const AssignProblem& problem, const std::vector<int32_t>& order) {
  if (problem.shared.empty()) return makespan_bound(problem.costs, order, problem.slots);
  const int64_t cells = problem.cell_count();
  const auto per_cell = static_cast<double>(problem.slots / cells);
  std::vector<double> own, shared;
  double total = 0;
  for (int32_t i = 0; i < problem.size(); ++i) {
    (problem.is_shared(i) ? shared : own).push_back(problem.costs[i]);
    total += problem.costs[i] * (problem.is_shared(i) ? per_cell : 1);
  }
  return std::max({makespan_bound(own, problem.slots), makespan_bound(shared, cells),
                   total / static_cast<double>(problem.slots)});
}

std::vector<double> slot_loads(const AssignProblem& problem, const std::vector<int32_t>& owners) {
  if (problem.shared.empty()) return sum_per_slot(problem.costs, owners, problem.slots);
  return per_slot<double>(problem, owners, [&](int32_t i, double& own, double& everywhere) {
    (problem.is_shared(i) ? everywhere : own) += problem.costs[i];
  });
}

std::vector<int64_t> slot_bytes(const AssignProblem& problem, const std::vector<int32_t>& owners) {
  if (problem.cell_bytes.empty()) return sum_per_slot(problem.bytes, owners, problem.slots);
  return per_slot<int64_t>(problem, owners, [&](int32_t i, int64_t& own, int64_t& everywhere) {
    own += problem.bytes[i];
    everywhere += problem.cell_bytes[i];
  });
}

std::vector<double> sum_per_slot(const std::vector<double>& values,
                                 const std::vector<int32_t>& owners, int64_t slots) {
  return sums(values, owners, slots);
}

std::vector<int64_t> sum_per_slot(const std::vector<int64_t>& values,
                                  const std::vector<int32_t>& owners, int64_t slots) {
  return sums(values, owners, slots);
}

}  // namespace dmuon

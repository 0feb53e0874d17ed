#include "engine/assign.h"

#include <algorithm>
#include <numeric>

#include "engine/assign_state.h"
#include "engine/error.h"
#include "engine/order.h"

namespace dmuon {
namespace {

bool within_memory(const AssignProblem& problem, const std::vector<int32_t>& owners) {
  if (problem.memory_limit == 0) return true;
  const std::vector<int64_t> bytes = sum_per_slot(problem.bytes, owners, problem.slots);
  return *std::max_element(bytes.begin(), bytes.end()) <= problem.memory_limit;
}

[[noreturn]] void throw_over_memory(const AssignProblem& problem) {
  const int64_t largest = *std::max_element(problem.bytes.begin(), problem.bytes.end());
  const int64_t total = std::accumulate(problem.bytes.begin(), problem.bytes.end(), int64_t{0});
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

std::vector<int32_t> first_owners(const AssignProblem& problem, const std::vector<int32_t>& order) {
  if (problem.max_owners == 0) {
    std::vector<int32_t> owners = assign::plain_lpt(problem, order);
    if (within_memory(problem, owners)) return owners;
  }
  std::vector<int32_t> owners = assign::limited_lpt(problem, order);
  if (owners.empty()) throw_over_memory(problem);
  return owners;
}

double bound_of(const std::vector<double>& costs, const std::vector<int32_t>& order,
                int64_t slots) {
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

template <class T>
std::vector<T> sums(const std::vector<T>& values, const std::vector<int32_t>& owners,
                    int64_t slots) {
  std::vector<T> sum(slots);
  for (size_t i = 0; i < values.size(); ++i) sum[owners[i]] += values[i];
  return sum;
}

}  // namespace

std::vector<int32_t> assign_lpt(const AssignProblem& problem) {
  const std::vector<int32_t> order = order_descending(problem.costs);
  std::vector<int32_t> owners = first_owners(problem, order);
  if (problem.size() <= problem.slots && !problem.constrained()) return owners;

  const double bound = bound_of(problem.costs, order, problem.slots);
  assign::Slots slots(problem, std::move(owners));
  if (problem.constrained()) assign::fill_idle(slots);
  assign::lower_makespan(slots, bound);
  if (slots.max_load() > bound * (1 + 1e-9)) {
    if (std::vector<int32_t> better = assign::repack(slots, bound); !better.empty()) {
      slots = assign::Slots(problem, std::move(better));
      assign::fill_idle(slots);
    }
  }
  assign::spread(slots, order);
  return slots.owners();
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
  if (costs.empty()) return 0;
  return bound_of(costs, order_descending(costs), slots);
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

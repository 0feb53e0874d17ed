#include "engine/plan_report.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/order.h"

namespace dmuon {
namespace {

// The most state that matrices whose costs fit into `load` can have, parts of matrices allowed: by
// falling bytes per cost. No owner has more.
int64_t most_bytes(const std::vector<double>& costs, const std::vector<int64_t>& bytes,
                   const std::vector<int32_t>& order, double load) {
  struct Group {
    double density, cost;  // of all its matrices
    bool operator<(const Group& other) const { return density < other.density; }
  };
  std::vector<Group> groups;
  double most = 0;
  for (int32_t i : order) {
    const auto state = static_cast<double>(bytes[i]);
    if (costs[i] == 0) {
      most += state;
    } else if (!groups.empty() && groups.back().density == state / costs[i]) {
      groups.back().cost += costs[i];
    } else {
      groups.push_back({state / costs[i], costs[i]});
    }
  }
  std::make_heap(groups.begin(), groups.end());
  while (load > 0 && !groups.empty()) {
    most += groups.front().density * std::min(load, groups.front().cost);
    load -= groups.front().cost;
    std::pop_heap(groups.begin(), groups.end());
    groups.pop_back();
  }
  return static_cast<int64_t>(std::ceil(most));
}

// A rank holds its own part of matrices that cost it at most `load`, and the shared part of
// matrices that cost its cell at most tp times as much.
int64_t most_bytes(const OwnershipPlan& plan, const AssignProblem& problem,
                   const std::vector<int32_t>& order, double load) {
  const int64_t own = most_bytes(problem.costs, problem.bytes, order, load);
  if (problem.cell_bytes.empty()) return own;
  const double of_cell = load * static_cast<double>(plan.mesh.tp);
  return own + most_bytes(plan.costs, problem.cell_bytes, order_descending(plan.costs), of_cell);
}

}  // namespace

PlanReport make_report(const OwnershipPlan& plan, const AssignProblem& problem,
                       const std::vector<int32_t>& order, const std::vector<int32_t>& slots) {
  const std::vector<double> loads = slot_loads(problem, slots);
  const std::vector<int64_t> held = slot_bytes(problem, slots);
  const double total = std::accumulate(plan.costs.begin(), plan.costs.end(), 0.0);
  const double largest = problem.costs[order.front()];
  PlanReport report;
  report.max_load = *std::max_element(loads.begin(), loads.end());
  report.mean_load = total / static_cast<double>(plan.mesh.ranks());
  report.w_star = largest > 0 ? total / largest : 0;
  report.lower_bound = makespan_bound(problem, order);
  report.max_state_bytes = *std::max_element(held.begin(), held.end());
  report.state_bytes_bound = plan.policy.memory_limit_bytes;
  if (report.state_bytes_bound == 0) {
    report.state_bytes_bound =
        std::max(report.max_state_bytes, most_bytes(plan, problem, order, report.max_load));
  }
  return report;
}

}  // namespace dmuon

// What an assignment is held against.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <vector>

namespace dmuon::testing {

template <class T>
T largest(const std::vector<T>& values) {
  return *std::max_element(values.begin(), values.end());
}

// The textbook algorithm: the yardstick, written as plainly as possible.
inline double lpt_makespan(std::vector<double> costs, int64_t slots) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  std::priority_queue<double, std::vector<double>, std::greater<>> loads;
  for (int64_t i = 0; i < slots; ++i) loads.push(0);
  double makespan = 0;
  for (const double cost : costs) {
    const double load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    makespan = std::max(makespan, load);
  }
  return makespan;
}

// Every assignment is tried: of few items only.
inline double best_makespan(const std::vector<double>& costs, std::vector<double>& loads,
                            size_t item) {
  if (item == costs.size()) return largest(loads);
  double best = std::numeric_limits<double>::infinity();
  for (double& load : loads) {
    load += costs[item];
    best = std::min(best, best_makespan(costs, loads, item + 1));
    load -= costs[item];
  }
  return best;
}

}  // namespace dmuon::testing

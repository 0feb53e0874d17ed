#include "benchmarks/plan/yardstick.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <set>

namespace dmuon::bench {
namespace {

constexpr double kRounding = 1e-12;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "plan benchmark: %s\n", what);
  std::exit(1);
}

size_t matrices_in_units(const OwnershipPlan& plan) {
  size_t count = 0;
  for (const Unit& unit : plan.units) {
    for (const Segment& segment : unit.segments) count += segment.matrices.size();
  }
  return count;
}

bool idle_beside_two(const OwnershipPlan& plan) {
  std::vector<int32_t> counts(plan.mesh.ranks());
  for (size_t i = 0; i < plan.owners.size(); ++i) {
    ++counts.at(plan.owners[i] * plan.mesh.tp + plan.tp_owners[i]);
  }
  const auto [fewest, most] = std::minmax_element(counts.begin(), counts.end());
  return *fewest == 0 && *most > 1;
}

// Can these matrices be packed onto `ranks` ranks with no load above `limit`?
class Packing {
 public:
  enum class Answer { yes, no, unknown };

  Packing(const std::vector<double>& costs, int64_t ranks, double limit)
      : matrices_(costs.size()), limit_(limit), ranks_(ranks) {
    std::map<double, int32_t, std::greater<>> counts;
    for (const double cost : costs) ++counts[cost];
    for (const auto& [cost, count] : counts) {
      costs_.push_back(cost);
      left_.push_back(count);
    }
    const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
    spare_ = static_cast<double>(ranks) * limit - total;
  }

  Answer run() {
    if (matrices_ > kMostMatrices || costs_.size() > kMostCosts) return Answer::unknown;
    const bool found = finish(ranks_, spare_);
    return found ? Answer::yes : fillings_ < 0 ? Answer::unknown : Answer::no;
  }

 private:
  static constexpr size_t kMostMatrices = 2'000;
  static constexpr size_t kMostCosts = 8;
  static constexpr int64_t kMostFillings = 2'000'000;

  // `spare`: room that may still be wasted.
  bool finish(int64_t ranks, double spare) {
    const auto first = std::find_if(left_.begin(), left_.end(), [](int32_t n) { return n > 0; });
    if (first == left_.end()) return true;
    if (ranks == 0 || spare < 0 || --fillings_ < 0) return false;
    if (hopeless_.count({ranks, left_}) > 0) return false;
    const auto k = static_cast<size_t>(first - left_.begin());
    --left_[k];
    const bool found = fill(k, limit_ - costs_[k], ranks, spare);
    ++left_[k];
    if (!found && fillings_ >= 0) hopeless_.insert({ranks, left_});
    return found;
  }

  // Adds matrices of cost k and below to the rank that has `room` left.
  bool fill(size_t k, double room, int64_t ranks, double spare) {
    if (k == costs_.size()) return !has_room(room) && finish(ranks - 1, spare - room);
    int32_t taken = 0;
    for (; left_[k] > 0 && costs_[k] <= room; ++taken, --left_[k]) room -= costs_[k];
    for (;; --taken, ++left_[k], room += costs_[k]) {
      if (fill(k + 1, room, ranks, spare)) return true;
      if (taken == 0) return false;
    }
  }

  bool has_room(double room) const {
    for (size_t k = 0; k < costs_.size(); ++k) {
      if (left_[k] > 0 && costs_[k] <= room) return true;
    }
    return false;
  }

  size_t matrices_;
  double limit_, spare_ = 0;
  int64_t ranks_, fillings_ = kMostFillings;
  std::vector<double> costs_;  // falling
  std::vector<int32_t> left_;
  std::set<std::pair<int64_t, std::vector<int32_t>>> hopeless_;
};

// Whether whole pieces of some size prove that the limit cannot be kept: a rank has room for
// floor(limit / piece) of them, and a matrix needs floor(cost / piece).
bool too_many_pieces(const std::vector<double>& costs, int64_t ranks, double limit) {
  const std::set<double> sizes(costs.begin(), costs.end());
  for (const double size : sizes) {
    for (int part = 1; size > 0 && part <= 8; ++part) {
      const double piece = size / part * (1 - 1e-13);  // any will do; so rounding takes none away
      double needed = 0;
      for (const double cost : costs) needed += std::floor(cost / piece);
      if (needed > static_cast<double>(ranks) * std::floor(limit / piece)) return true;
    }
  }
  return false;
}

}  // namespace

double plain_lpt(std::vector<double> costs, int64_t slots) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  std::priority_queue<double, std::vector<double>, std::greater<>> loads(
      std::greater<>(), std::vector<double>(static_cast<size_t>(slots)));
  double largest = 0;
  for (const double cost : costs) {
    const double load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    largest = std::max(largest, load);
  }
  return largest;
}

size_t different(std::vector<double> costs) {
  std::sort(costs.begin(), costs.end());
  return static_cast<size_t>(std::unique(costs.begin(), costs.end()) - costs.begin());
}

double worst_cell_over_lpt(const OwnershipPlan& plan) {
  std::vector<std::vector<double>> costs(plan.mesh.cells());
  for (size_t i = 0; i < plan.owners.size(); ++i) costs[plan.owners[i]].push_back(plan.costs[i]);
  const std::vector<double> loads = plan.loads();
  double worst = 0;
  for (int64_t cell = 0; cell < plan.mesh.cells(); ++cell) {
    if (costs[cell].empty()) continue;
    const auto first = loads.begin() + cell * plan.mesh.tp;
    const double load = *std::max_element(first, first + plan.mesh.tp);
    worst = std::max(worst, load / plain_lpt(costs[cell], plan.mesh.tp));
  }
  return worst;
}

void require_sound(const OwnershipPlan& plan, size_t matrices) {
  require(plan.matrices.size() == matrices && plan.owners.size() == matrices, "a matrix is lost");
  require(matrices_in_units(plan) == matrices, "a matrix is in no unit, or in two");
  require(!idle_beside_two(plan), "a rank is idle while another holds two matrices");
  const double load = plan.report.max_load;
  require(load <= plain_lpt(plan.costs, plan.mesh.ranks()) * (1 + kRounding),
          "worse than plain LPT");
  require(worst_cell_over_lpt(plan) <= 1 + kRounding, "a cell is worse than plain LPT");
  require(plan.report.lower_bound <= load * (1 + kRounding), "the bound is wrong");
}

Optimum optimum(const OwnershipPlan& plan) {
  const double load = plan.report.max_load;
  if (load <= plan.report.lower_bound * (1 + 1e-9)) return Optimum::bound_met;
  const double limit = load * (1 - 1e-9);
  const int64_t ranks = plan.mesh.ranks();
  if (too_many_pieces(plan.costs, ranks, limit)) return Optimum::proved;
  const Packing::Answer answer = Packing(plan.costs, ranks, limit).run();
  require(answer != Packing::Answer::yes, "there is a better assignment");
  return answer == Packing::Answer::no ? Optimum::proved : Optimum::open;
}

}  // namespace dmuon::bench

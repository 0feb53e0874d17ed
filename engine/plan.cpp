#include "engine/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "engine/assign.h"
#include "engine/error.h"
#include "engine/order.h"

namespace dmuon {
namespace {

constexpr int64_t kMaxSlots = int64_t{1} << 24;

void check(const Mesh& mesh) {
  if (mesh.shard < 1 || mesh.replicate < 1) {
    throw ConfigError(message("the mesh is ", mesh.shard, " (shard) x ", mesh.replicate,
                              " (replicate); both axes must be at least 1."));
  }
  if (mesh.shard > kMaxSlots / mesh.replicate) {
    throw ConfigError(message("the mesh is ", mesh.shard, " (shard) x ", mesh.replicate,
                              " (replicate); at most ", kMaxSlots, " ranks are supported."));
  }
}

void check_not_negative(const char* name, int64_t value) {
  if (value >= 0) return;
  throw ConfigError(message(name, " is ", value, "; give a positive number, or 0 for no limit."));
}

void check(const PlanPolicy& policy) {
  check_not_negative("max_owners_per_group", policy.max_owners_per_group);
  check_not_negative("memory_limit_bytes", policy.memory_limit_bytes);
  if (policy.ns_steps < 1) {
    throw ConfigError(message("ns_steps is ", policy.ns_steps, "; at least 1 is needed."));
  }
}

void check(const Matrix& matrix) {
  if (matrix.batch < 0 || matrix.rows < 0 || matrix.cols < 0) {
    throw ConfigError(message("'", matrix.name, "' is ", matrix.batch, " x ", matrix.rows, " x ",
                              matrix.cols, " (batch x rows x cols); no size may be below 0."));
  }
  if (matrix.state_bytes < 0) {
    throw ConfigError(message("'", matrix.name, "' has state_bytes = ", matrix.state_bytes,
                              "; it may not be below 0."));
  }
}

void check(const std::vector<Matrix>& sorted) {
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i > 0 && sorted[i].name == sorted[i - 1].name) {
      throw ConfigError(message("'", sorted[i].name, "' is listed twice (units '",
                                sorted[i - 1].unit, "' and '", sorted[i].unit,
                                "'); list a tied weight once, under its smallest name."));
    }
    check(sorted[i]);
  }
}

// order[k] is the place that element k comes from. In place: the list may be large.
void permute(std::vector<Matrix>& matrices, std::vector<int32_t> order) {
  for (int32_t start = 0; start < static_cast<int32_t>(order.size()); ++start) {
    if (order[start] == start) continue;
    Matrix first = std::move(matrices[start]);
    int32_t hole = start;
    while (order[hole] != start) {
      matrices[hole] = std::move(matrices[order[hole]]);
      hole = std::exchange(order[hole], hole);
    }
    matrices[hole] = std::move(first);
    order[hole] = hole;
  }
}

void sort_by_name(std::vector<Matrix>& matrices) {
  std::vector<std::string_view> names;
  names.reserve(matrices.size());
  for (const Matrix& matrix : matrices) names.push_back(matrix.name);
  permute(matrices, order_by_name(names));
}

// One string of each matrix as a number; equal strings have equal numbers.
struct Ids {
  std::vector<int32_t> of_matrix;
  std::vector<std::string_view> names;  // by number
};

Ids number(const std::vector<Matrix>& matrices, std::string Matrix::*text) {
  Ids ids;
  ids.of_matrix.reserve(matrices.size());
  std::unordered_map<std::string_view, int32_t> known;
  const std::string* last = nullptr;  // neighbours in name order mostly agree
  for (const Matrix& matrix : matrices) {
    const std::string& name = matrix.*text;
    if (last == nullptr || name != *last) {
      const auto [entry, added] = known.try_emplace(name, static_cast<int32_t>(ids.names.size()));
      if (added) ids.names.push_back(name);
      ids.of_matrix.push_back(entry->second);
    } else {
      ids.of_matrix.push_back(ids.of_matrix.back());
    }
    last = &name;
  }
  return ids;
}

// Renumbers by name.
void sort_ids(Ids& ids) {
  const std::vector<int32_t> order = order_by_name(ids.names);
  std::vector<int32_t> place(order.size());
  std::vector<std::string_view> names(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    place[order[i]] = static_cast<int32_t>(i);
    names[i] = ids.names[order[i]];
  }
  for (int32_t& id : ids.of_matrix) id = place[id];
  ids.names = std::move(names);
}

std::vector<int32_t> layers_of(const std::vector<Matrix>& matrices) {
  Ids ids = number(matrices, &Matrix::layer);
  const auto none = std::find(ids.names.begin(), ids.names.end(), "") - ids.names.begin();
  for (int32_t& id : ids.of_matrix) id = id == none ? -1 : id;
  return std::move(ids.of_matrix);
}

std::vector<double> weights(const OwnershipPlan& plan) {
  if (plan.policy.cost_model == CostModel::optimizer) return plan.costs;
  std::vector<double> numel;
  for (const Matrix& matrix : plan.matrices) {
    numel.push_back(static_cast<double>(matrix.batch) * static_cast<double>(matrix.rows) *
                    static_cast<double>(matrix.cols));
  }
  return numel;
}

std::vector<int64_t> bytes_of(const std::vector<Matrix>& matrices) {
  std::vector<int64_t> bytes;
  bytes.reserve(matrices.size());
  for (const Matrix& matrix : matrices) bytes.push_back(matrix.state_bytes);
  return bytes;
}

std::vector<int32_t> owners_of(const OwnershipPlan& plan, const std::vector<int32_t>& units) {
  const AssignProblem problem{.costs = weights(plan),
                              .bytes = bytes_of(plan.matrices),
                              .units = units,
                              .layers = layers_of(plan.matrices),
                              .slots = plan.mesh.slots(),
                              .memory_limit = plan.policy.memory_limit_bytes,
                              .max_owners = plan.policy.max_owners_per_group};
  return plan.policy.strategy == OwnerStrategy::lpt ? assign_lpt(problem)
                                                    : assign_round_robin(problem);
}

// A counting sort: stable.
std::vector<int32_t> sorted_by(const std::vector<int32_t>& keys, int64_t largest_key,
                               const std::vector<int32_t>& order) {
  std::vector<int32_t> place(largest_key + 1);
  for (int32_t key : keys) ++place[key];
  std::exclusive_scan(place.begin(), place.end(), place.begin(), 0);
  std::vector<int32_t> sorted(order.size());
  for (int32_t i : order) sorted[place[keys[i]]++] = i;
  return sorted;
}

std::vector<Unit> make_units(const OwnershipPlan& plan, const Ids& units) {
  std::vector<int32_t> order(plan.matrices.size());
  std::iota(order.begin(), order.end(), 0);
  if (plan.policy.pack) order = sorted_by(plan.owners, plan.mesh.slots(), order);
  order = sorted_by(units.of_matrix, static_cast<int64_t>(units.names.size()), order);

  std::vector<Unit> result;
  result.reserve(units.names.size());
  for (std::string_view name : units.names) result.push_back({std::string(name), {}});
  for (int32_t i : order) {
    std::vector<Segment>& segments = result[units.of_matrix[i]].segments;
    const bool joins =
        plan.policy.pack && !segments.empty() && segments.back().owner == plan.owners[i];
    if (!joins) segments.push_back({plan.owners[i], {}});
    segments.back().matrices.push_back(i);
  }
  return result;
}

// The most state that matrices whose costs fit into `load` can have, parts of matrices allowed: by
// falling bytes per cost. No owner has more.
int64_t most_bytes(const OwnershipPlan& plan, double load) {
  using Density = std::pair<double, int32_t>;
  std::vector<Density> heap;
  double bytes = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(plan.costs.size()); ++i) {
    const auto state = static_cast<double>(plan.matrices[i].state_bytes);
    if (plan.costs[i] > 0) heap.emplace_back(state / plan.costs[i], i);
    if (plan.costs[i] == 0) bytes += state;
  }
  std::make_heap(heap.begin(), heap.end());
  while (load > 0 && !heap.empty()) {
    const auto [density, i] = heap.front();
    bytes += density * std::min(load, plan.costs[i]);
    load -= plan.costs[i];
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
  }
  return static_cast<int64_t>(std::ceil(bytes));
}

PlanReport make_report(const OwnershipPlan& plan) {
  const std::vector<double> loads = plan.loads();
  const std::vector<int64_t> bytes = plan.state_bytes();
  const double total = std::accumulate(plan.costs.begin(), plan.costs.end(), 0.0);
  const double largest = *std::max_element(plan.costs.begin(), plan.costs.end());
  PlanReport report;
  report.max_load = *std::max_element(loads.begin(), loads.end());
  report.mean_load = total / static_cast<double>(plan.mesh.slots());
  report.w_star = largest > 0 ? total / largest : 0;
  report.lower_bound = makespan_bound(plan.costs, plan.mesh.slots());
  report.max_state_bytes = *std::max_element(bytes.begin(), bytes.end());
  report.state_bytes_bound =
      plan.policy.memory_limit_bytes > 0
          ? plan.policy.memory_limit_bytes
          : std::max(report.max_state_bytes, most_bytes(plan, report.max_load));
  return report;
}

void add(Hasher& hasher, const Mesh& mesh, const PlanPolicy& policy) {
  for (int64_t value : {mesh.shard, mesh.replicate, static_cast<int64_t>(policy.strategy),
                        static_cast<int64_t>(policy.cost_model), policy.max_owners_per_group,
                        policy.memory_limit_bytes, int64_t{policy.pack}, int64_t{policy.ns_steps},
                        int64_t{policy.symmetric_products}, int64_t{policy.direct}}) {
    hasher.add(value);
  }
}

Digest make_digest(const OwnershipPlan& plan) {
  Hasher hasher;
  add(hasher, plan.mesh, plan.policy);
  for (size_t i = 0; i < plan.matrices.size(); ++i) {
    const Matrix& m = plan.matrices[i];
    hasher.add(m.name).add(m.unit).add(m.layer).add(m.dtype);
    hasher.add(m.batch).add(m.rows).add(m.cols).add(m.state_bytes);
    hasher.add(static_cast<int64_t>(m.route)).add(int64_t{plan.owners[i]});
  }
  return hasher.digest();
}

}  // namespace

OwnershipPlan make_plan(std::vector<Matrix> matrices, const Mesh& mesh, const PlanPolicy& policy) {
  check(mesh);
  check(policy);
  if (matrices.empty()) {
    throw ConfigError("no matrices are given; the predicate must select at least one parameter.");
  }
  OwnershipPlan plan;
  plan.mesh = mesh;
  plan.policy = policy;
  sort_by_name(matrices);
  check(matrices);
  plan.matrices = std::move(matrices);
  plan.costs.reserve(plan.matrices.size());
  for (const Matrix& m : plan.matrices) plan.costs.push_back(newton_schulz_cost(m, policy));
  Ids units = number(plan.matrices, &Matrix::unit);
  sort_ids(units);
  plan.owners = owners_of(plan, units.of_matrix);
  plan.units = make_units(plan, units);
  plan.report = make_report(plan);
  plan.digest = make_digest(plan);
  return plan;
}

int32_t OwnershipPlan::find(std::string_view name) const {
  const auto found =
      std::lower_bound(matrices.begin(), matrices.end(), name,
                       [](const Matrix& m, std::string_view n) { return m.name < n; });
  const bool present = found != matrices.end() && found->name == name;
  return present ? static_cast<int32_t>(found - matrices.begin()) : -1;
}

std::vector<double> OwnershipPlan::loads() const {
  return sum_per_slot(costs, owners, mesh.slots());
}

std::vector<int64_t> OwnershipPlan::state_bytes() const {
  return sum_per_slot(bytes_of(matrices), owners, mesh.slots());
}

std::string layer_of(std::string_view parameter, const std::vector<std::string>& containers) {
  size_t parent_end = 0;  // "" first: the root itself may be a Sequential
  while (true) {
    const size_t child = parent_end == 0 ? 0 : parent_end + 1;
    const size_t child_end = parameter.find('.', child);
    if (child_end == std::string_view::npos) return "";
    const std::string_view parent = parameter.substr(0, parent_end);
    if (std::find(containers.begin(), containers.end(), parent) != containers.end()) {
      return std::string(parameter.substr(0, child_end));
    }
    parent_end = child_end;
  }
}

}  // namespace dmuon

#include "engine/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/assign.h"
#include "engine/error.h"
#include "engine/order.h"
#include "engine/plan_input.h"
#include "engine/plan_report.h"

namespace dmuon {
namespace {

constexpr int64_t kMaxSlots = int64_t{1} << 24;

void check(const Mesh& mesh) {
  const std::string shape = message("the mesh is ", mesh.shard, " (shard) x ", mesh.replicate,
                                    " (replicate) x ", mesh.tp, " (tp)");
  if (mesh.shard < 1 || mesh.replicate < 1 || mesh.tp < 1) {
    throw ConfigError(message(shape, "; every axis must be at least 1."));
  }
  if (mesh.shard > kMaxSlots / mesh.replicate / mesh.tp) {
    throw ConfigError(message(shape, "; at most ", kMaxSlots, " ranks are supported."));
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

void per_slot(std::vector<double>& costs, const std::vector<char>& shared, int64_t tp) {
  for (size_t i = 0; i < shared.size(); ++i) {
    if (shared[i]) costs[i] /= static_cast<double>(tp);
  }
}

// In true costs. Takes what it needs out of `reader`.
AssignProblem make_problem(const OwnershipPlan& plan, Reader& reader) {
  const auto& names = reader.layers.names;
  const auto none = std::find(names.begin(), names.end(), "") - names.begin();
  for (int32_t& id : reader.layers.of_matrix) id = id == none ? -1 : id;
  AssignProblem problem{.costs = plan.costs,
                        .bytes = std::move(reader.bytes),
                        .cell_bytes = std::move(reader.cell_bytes),
                        .shared = std::move(reader.shared),
                        .units = std::move(reader.units.of_matrix),
                        .layers = std::move(reader.layers.of_matrix),
                        .slots = plan.mesh.ranks(),
                        .cells = plan.mesh.cells(),
                        .memory_limit = plan.policy.memory_limit_bytes,
                        .max_owners = plan.policy.max_owners_per_group};
  per_slot(problem.costs, problem.shared, plan.mesh.tp);
  return problem;
}

// `order`: of falling costs. Returns slots.
std::vector<int32_t> assign(const OwnershipPlan& plan, const AssignProblem& problem,
                            const std::vector<int32_t>& order, std::vector<double> weights) {
  if (plan.policy.strategy == OwnerStrategy::round_robin) return assign_round_robin(problem);
  if (plan.policy.cost_model == CostModel::optimizer) return assign_lpt(problem, order);
  AssignProblem by_weight = problem;
  by_weight.costs = std::move(weights);
  per_slot(by_weight.costs, by_weight.shared, plan.mesh.tp);
  return assign_lpt(by_weight);
}

// Slots number the cells first, then their TP ranks.
void split_owners(OwnershipPlan& plan, const std::vector<int32_t>& slots) {
  const auto cells = static_cast<int32_t>(plan.mesh.cells());
  for (size_t i = 0; i < slots.size(); ++i) {
    const bool shared = elementwise(plan.matrices[i], plan.mesh);
    plan.owners.push_back(slots[i] % cells);
    plan.tp_owners.push_back(shared ? 0 : slots[i] / cells);
  }
}

std::vector<int32_t> ranks_of(const OwnershipPlan& plan) {
  std::vector<int32_t> ranks(plan.owners);
  const auto tp = static_cast<int32_t>(plan.mesh.tp);
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = ranks[i] * tp + plan.tp_owners[i];
  return ranks;
}

// `on_rank` gives what a matrix adds to its owner and to every TP rank of its cell.
template <class T, class OnRank>
std::vector<T> per_rank(const OwnershipPlan& plan, OnRank on_rank) {
  const int64_t tp = plan.mesh.tp;
  std::vector<T> sums(plan.mesh.ranks()), everywhere(plan.mesh.cells());
  for (size_t i = 0; i < plan.owners.size(); ++i) {
    const auto [own, shared] = on_rank(i);
    sums[plan.owners[i] * tp + plan.tp_owners[i]] += own;
    everywhere[plan.owners[i]] += shared;
  }
  for (size_t rank = 0; rank < sums.size(); ++rank) sums[rank] += everywhere[rank / tp];
  return sums;
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

// Where in `order` the segments begin, and its end. `order` has units together, and in them, if
// packed, owners together.
std::vector<size_t> segment_starts(const OwnershipPlan& plan, const std::vector<int32_t>& units,
                                   const std::vector<int32_t>& order) {
  std::vector<size_t> starts{0};
  for (size_t i = 1; i < order.size(); ++i) {
    const int32_t a = order[i - 1], b = order[i];
    const bool together = units[a] == units[b] && plan.owners[a] == plan.owners[b];
    if (!plan.policy.pack || !together) starts.push_back(i);
  }
  starts.push_back(order.size());
  return starts;
}

std::vector<Unit> make_units(const OwnershipPlan& plan, const std::vector<int32_t>& unit,
                             const std::vector<std::string_view>& names) {
  std::vector<int32_t> order(plan.matrices.size());
  std::iota(order.begin(), order.end(), 0);
  if (plan.policy.pack) order = sorted_by(plan.owners, plan.mesh.cells(), order);
  order = sorted_by(unit, static_cast<int64_t>(names.size()), order);

  const std::vector<size_t> starts = segment_starts(plan, unit, order);
  std::vector<size_t> segments(names.size());
  for (size_t k = 0; k + 1 < starts.size(); ++k) ++segments[unit[order[starts[k]]]];
  std::vector<Unit> units(names.size());
  for (size_t u = 0; u < units.size(); ++u) {
    units[u].name = names[u];
    units[u].segments.reserve(segments[u]);
  }
  for (size_t k = 0; k + 1 < starts.size(); ++k) {
    const int32_t* first = order.data() + starts[k];
    const int32_t* last = order.data() + starts[k + 1];
    units[unit[*first]].segments.push_back(
        {plan.owners[*first], std::vector<int32_t>(first, last)});
  }
  return units;
}

void add(Hasher& hasher, const Mesh& mesh, const PlanPolicy& policy) {
  for (int64_t value : {mesh.shard, mesh.replicate, mesh.tp, static_cast<int64_t>(policy.strategy),
                        static_cast<int64_t>(policy.cost_model), policy.max_owners_per_group,
                        policy.memory_limit_bytes, int64_t{policy.pack}, int64_t{policy.ns_steps},
                        int64_t{policy.symmetric_products}, int64_t{policy.direct}}) {
    hasher.add(value);
  }
}

Digest make_digest(const OwnershipPlan& plan, const Reader& reader) {
  Hasher hasher;
  add(hasher, plan.mesh, plan.policy);
  for (const Hasher* part : {&reader.texts, &reader.numbers}) {
    for (uint64_t word : part->digest().words) hasher.add(static_cast<int64_t>(word));
  }
  for (const int32_t rank : ranks_of(plan)) hasher.add(int64_t{rank});
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
  plan.matrices = std::move(matrices);
  Reader reader(plan.matrices, mesh, policy);
  reader.units.renumber_by_name();
  plan.costs = std::move(reader.costs);
  const AssignProblem problem = make_problem(plan, reader);
  const std::vector<int32_t> order = order_descending(problem.costs);
  const std::vector<int32_t> slots = assign(plan, problem, order, std::move(reader.weights));
  split_owners(plan, slots);
  plan.units = make_units(plan, problem.units, reader.units.names);
  plan.report = make_report(plan, problem, order, slots);
  plan.digest = make_digest(plan, reader);
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
  return per_rank<double>(*this, [&](size_t i) {
    const bool shared = elementwise(matrices[i], mesh);
    return shared ? std::pair(0.0, costs[i] / static_cast<double>(mesh.tp))
                  : std::pair(costs[i], 0.0);
  });
}

std::vector<int64_t> OwnershipPlan::state_bytes() const {
  return per_rank<int64_t>(*this, [&](size_t i) {
    const Held bytes = held(matrices[i], mesh);
    return std::pair(bytes.own, bytes.everywhere);
  });
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

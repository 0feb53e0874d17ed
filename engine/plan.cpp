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

void check(const Matrix& matrix, const Matrix* before) {
  if (before != nullptr && before->name == matrix.name) {
    throw ConfigError(message("'", matrix.name, "' is listed twice (units '", before->unit,
                              "' and '", matrix.unit,
                              "'); list a tied weight once, under its smallest name."));
  }
  if (matrix.batch < 0 || matrix.rows < 0 || matrix.cols < 0) {
    throw ConfigError(message("'", matrix.name, "' is ", matrix.batch, " x ", matrix.rows, " x ",
                              matrix.cols, " (batch x rows x cols); no size may be below 0."));
  }
  if (matrix.state_bytes < 0) {
    throw ConfigError(message("'", matrix.name, "' has state_bytes = ", matrix.state_bytes,
                              "; it may not be below 0."));
  }
}

std::vector<std::string_view> names_of(const std::vector<Matrix>& matrices) {
  std::vector<std::string_view> names;
  names.reserve(matrices.size());
  for (const Matrix& matrix : matrices) names.push_back(matrix.name);
  return names;
}

// Texts as numbers; equal texts have equal numbers.
class Ids {
 public:
  // `same`: as the one before, which neighbours in name order mostly are.
  void add(std::string_view text, bool same) {
    of_matrix.push_back(same ? of_matrix.back() : find(text));
  }

  void renumber_by_name() {
    const std::vector<int32_t> order = order_by_name(names);
    std::vector<int32_t> place(order.size());
    std::vector<std::string_view> sorted(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      place[order[i]] = static_cast<int32_t>(i);
      sorted[i] = names[order[i]];
    }
    for (int32_t& id : of_matrix) id = place[id];
    names = std::move(sorted);
  }

  std::vector<int32_t> of_matrix;
  std::vector<std::string_view> names;  // by number

 private:
  int32_t find(std::string_view text) {
    const auto [entry, added] = known_.try_emplace(text, static_cast<int32_t>(names.size()));
    if (added) names.push_back(text);
    return entry->second;
  }

  std::unordered_map<std::string_view, int32_t> known_;
};

double numel(const Matrix& m) {
  return static_cast<double>(m.batch) * static_cast<double>(m.rows) * static_cast<double>(m.cols);
}

// Reads every matrix once, in name order. They are large and far apart: this is where planning a
// long list spends its time.
class Reader {
 public:
  explicit Reader(const PlanPolicy& policy) : policy_(policy) {}

  // The matrices stay where they are as long as the ids are used.
  void add(const Matrix& m, const Matrix* before) {
    check(m, before);
    const bool same_unit = before != nullptr && m.unit == before->unit;
    const bool same_layer = before != nullptr && m.layer == before->layer;
    const bool same_dtype = before != nullptr && m.dtype == before->dtype;
    units.add(m.unit, same_unit);
    layers.add(m.layer, same_layer);
    costs.push_back(newton_schulz_cost(m, policy_));
    bytes.push_back(m.state_bytes);
    if (policy_.cost_model == CostModel::numel) weights.push_back(numel(m));

    // Bits say which texts are those before; only the others follow. Two chains run side by side.
    texts.add(m.name).add(int64_t{same_unit} | same_layer << 1 | same_dtype << 2);
    if (!same_unit) texts.add(m.unit);
    if (!same_layer) texts.add(m.layer);
    if (!same_dtype) texts.add(m.dtype);
    numbers.add(static_cast<int64_t>(m.route)).add(m.batch).add(m.rows).add(m.cols);
    numbers.add(m.state_bytes);
  }

  Ids units, layers;
  std::vector<double> costs;
  std::vector<double> weights;  // to be balanced, where those are not the costs
  std::vector<int64_t> bytes;
  Hasher texts, numbers;

 private:
  const PlanPolicy& policy_;
};

constexpr int kAhead = 6;  // matrices, or their names, on their way from memory

void prefetch(const void* first, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(static_cast<const char*>(first) + line);
  }
}

void read(const std::vector<Matrix>& sorted, Reader& reader) {
  const Matrix* before = nullptr;
  for (const Matrix& matrix : sorted) {
    if (&matrix + kAhead < sorted.data() + sorted.size()) {
      const std::string& name = (&matrix + kAhead)->name;
      prefetch(name.data(), name.size());
    }
    reader.add(matrix, before);
    before = &matrix;
  }
}

// Leaves texts alone that are equal, as they mostly are: comparing costs less than moving.
void take(Matrix& to, Matrix& from) {
  for (auto text : {&Matrix::unit, &Matrix::layer, &Matrix::dtype}) {
    if (to.*text != from.*text) to.*text = std::move(from.*text);
  }
  to.name.swap(from.name);
  to.batch = from.batch;
  to.rows = from.rows;
  to.cols = from.cols;
  to.state_bytes = from.state_bytes;
  to.route = from.route;
}

// order[k] is the place that element k comes from. In place: new pages would cost as much again.
void permute(std::vector<Matrix>& matrices, std::vector<int32_t> order) {
  for (int32_t start = 0; start < static_cast<int32_t>(order.size()); ++start) {
    if (order[start] == start) continue;
    Matrix first = std::move(matrices[start]);
    int32_t hole = start, ahead = start;
    for (int i = 0; i < kAhead; ++i) ahead = order[ahead];
    while (order[hole] != start) {
      ahead = order[ahead];
      prefetch(&matrices[ahead], sizeof(Matrix));
      take(matrices[hole], matrices[order[hole]]);
      hole = std::exchange(order[hole], hole);
    }
    matrices[hole] = std::move(first);
    order[hole] = hole;
  }
}

// Layers as assign.h wants them: -1 for none.
std::vector<int32_t> layer_ids(const Ids& layers) {
  const auto none = std::find(layers.names.begin(), layers.names.end(), "") - layers.names.begin();
  std::vector<int32_t> ids = layers.of_matrix;
  for (int32_t& id : ids) id = id == none ? -1 : id;
  return ids;
}

std::vector<int32_t> make_owners(const OwnershipPlan& plan, const Reader& reader,
                                 const std::vector<int32_t>& order) {
  const bool by_cost = plan.policy.cost_model == CostModel::optimizer;
  const AssignProblem problem{.costs = by_cost ? plan.costs : reader.weights,
                              .bytes = reader.bytes,
                              .units = reader.units.of_matrix,
                              .layers = layer_ids(reader.layers),
                              .slots = plan.mesh.slots(),
                              .memory_limit = plan.policy.memory_limit_bytes,
                              .max_owners = plan.policy.max_owners_per_group};
  if (plan.policy.strategy == OwnerStrategy::round_robin) return assign_round_robin(problem);
  return by_cost ? assign_lpt(problem, order) : assign_lpt(problem);
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

std::vector<Unit> make_units(const OwnershipPlan& plan, const Ids& ids) {
  std::vector<int32_t> order(plan.matrices.size());
  std::iota(order.begin(), order.end(), 0);
  if (plan.policy.pack) order = sorted_by(plan.owners, plan.mesh.slots(), order);
  order = sorted_by(ids.of_matrix, static_cast<int64_t>(ids.names.size()), order);

  const std::vector<size_t> starts = segment_starts(plan, ids.of_matrix, order);
  std::vector<size_t> segments(ids.names.size());
  for (size_t k = 0; k + 1 < starts.size(); ++k) ++segments[ids.of_matrix[order[starts[k]]]];
  std::vector<Unit> units(ids.names.size());
  for (size_t u = 0; u < units.size(); ++u) {
    units[u].name = ids.names[u];
    units[u].segments.reserve(segments[u]);
  }
  for (size_t k = 0; k + 1 < starts.size(); ++k) {
    const int32_t* first = order.data() + starts[k];
    const int32_t* last = order.data() + starts[k + 1];
    units[ids.of_matrix[*first]].segments.push_back(
        {plan.owners[*first], std::vector<int32_t>(first, last)});
  }
  return units;
}

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

PlanReport make_report(const OwnershipPlan& plan, const std::vector<int64_t>& bytes,
                       const std::vector<int32_t>& order) {
  const std::vector<double> loads = plan.loads();
  const std::vector<int64_t> held = sum_per_slot(bytes, plan.owners, plan.mesh.slots());
  const double total = std::accumulate(plan.costs.begin(), plan.costs.end(), 0.0);
  const double largest = plan.costs[order.front()];
  PlanReport report;
  report.max_load = *std::max_element(loads.begin(), loads.end());
  report.mean_load = total / static_cast<double>(plan.mesh.slots());
  report.w_star = largest > 0 ? total / largest : 0;
  report.lower_bound = makespan_bound(plan.costs, order, plan.mesh.slots());
  report.max_state_bytes = *std::max_element(held.begin(), held.end());
  report.state_bytes_bound = plan.policy.memory_limit_bytes;
  if (report.state_bytes_bound == 0) {
    report.state_bytes_bound =
        std::max(report.max_state_bytes, most_bytes(plan.costs, bytes, order, report.max_load));
  }
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

Digest make_digest(const OwnershipPlan& plan, const Reader& reader) {
  Hasher hasher;
  add(hasher, plan.mesh, plan.policy);
  for (const Hasher* part : {&reader.texts, &reader.numbers}) {
    for (uint64_t word : part->digest().words) hasher.add(static_cast<int64_t>(word));
  }
  for (int32_t owner : plan.owners) hasher.add(int64_t{owner});
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
  Reader reader(policy);
  permute(matrices, order_by_name(names_of(matrices)));
  plan.matrices = std::move(matrices);
  read(plan.matrices, reader);
  reader.units.renumber_by_name();
  plan.costs = std::move(reader.costs);
  const std::vector<int32_t> order = order_descending(plan.costs);
  plan.owners = make_owners(plan, reader, order);
  plan.units = make_units(plan, reader.units);
  plan.report = make_report(plan, reader.bytes, order);
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
  return sum_per_slot(costs, owners, mesh.slots());
}

std::vector<int64_t> OwnershipPlan::state_bytes() const {
  std::vector<int64_t> held(mesh.slots());
  for (size_t i = 0; i < owners.size(); ++i) held[owners[i]] += matrices[i].state_bytes;
  return held;
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

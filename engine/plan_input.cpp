#include "engine/plan_input.h"

#include <utility>

#include "engine/error.h"
#include "engine/order.h"

namespace dmuon {
namespace {

constexpr int kAhead = 6;  // matrices, or their names, on their way from memory

void prefetch(const void* first, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(static_cast<const char*>(first) + line);
  }
}

void check_bytes(const Matrix& matrix, const char* what, int64_t bytes) {
  if (bytes >= 0) return;
  throw ConfigError(
      message("'", matrix.name, "' has ", what, " = ", bytes, "; it may not be below 0."));
}

void check(const Matrix& matrix, const Matrix* before) {
  if (before != nullptr && before->name == matrix.name) {
    throw ConfigError(message(
        "'", matrix.name, "' is listed twice; list a tied weight once, under its smallest name."));
  }
  if (matrix.batch < 0 || matrix.rows < 0 || matrix.cols < 0) {
    throw ConfigError(message("'", matrix.name, "' is ", matrix.batch, " x ", matrix.rows, " x ",
                              matrix.cols, " (batch x rows x cols); no size may be below 0."));
  }
  check_bytes(matrix, "state_bytes", matrix.state_bytes);
  check_bytes(matrix, "shard_bytes", matrix.shard_bytes);
}

std::vector<std::string_view> names_of(const std::vector<Matrix>& matrices) {
  std::vector<std::string_view> names;
  names.reserve(matrices.size());
  for (const Matrix& matrix : matrices) names.push_back(matrix.name);
  return names;
}

double numel(const Matrix& m) {
  return static_cast<double>(m.batch) * static_cast<double>(m.rows) * static_cast<double>(m.cols);
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
      matrices[hole] = std::move(matrices[order[hole]]);
      hole = std::exchange(order[hole], hole);
    }
    matrices[hole] = std::move(first);
    order[hole] = hole;
  }
}

}  // namespace

void Ids::renumber_by_name() {
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

int32_t Ids::find(std::string_view text) {
  const auto [entry, added] = known_.try_emplace(text, static_cast<int32_t>(names.size()));
  if (added) names.push_back(text);
  return entry->second;
}

Reader::Reader(const std::vector<Matrix>& sorted, const Mesh& mesh, const PlanPolicy& policy) {
  for (Ids* ids : {&units, &layers}) ids->of_matrix.reserve(sorted.size());
  costs.reserve(sorted.size());
  bytes.reserve(sorted.size());
  if (mesh.tp > 1) cell_bytes.reserve(sorted.size());
  const Matrix* before = nullptr;
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i + kAhead < sorted.size()) {
      prefetch(sorted[i + kAhead].name.data(), sorted[i + kAhead].name.size());
    }
    add(sorted[i], before, mesh, policy);
    before = &sorted[i];
  }
  if (!shared.empty()) shared.resize(sorted.size());
}

void Reader::add(const Matrix& m, const Matrix* before, const Mesh& mesh,
                 const PlanPolicy& policy) {
  check(m, before);
  units.add(m.unit, before != nullptr && m.unit == before->unit);
  layers.add(m.layer, before != nullptr && m.layer == before->layer);
  costs.push_back(newton_schulz_cost(m, policy));
  if (policy.cost_model == CostModel::numel) weights.push_back(numel(m));
  add_bytes(m, mesh);
  add_digest(m, before);
}

void Reader::add_bytes(const Matrix& m, const Mesh& mesh) {
  const Held bytes_of = held(m, mesh);
  bytes.push_back(bytes_of.own);
  if (mesh.tp > 1) cell_bytes.push_back(bytes_of.everywhere);
  if (!elementwise(m, mesh)) return;
  shared.resize(bytes.size());
  shared.back() = 1;
}

// Bits say which texts are those before, and whether shard_bytes follow; only the others do.
void Reader::add_digest(const Matrix& m, const Matrix* before) {
  const bool same_unit = before != nullptr && m.unit == before->unit;
  const bool same_layer = before != nullptr && m.layer == before->layer;
  const bool same_dtype = before != nullptr && m.dtype == before->dtype;
  texts.add(m.name).add(int64_t{same_unit} | same_layer << 1 | same_dtype << 2);
  if (!same_unit) texts.add(m.unit);
  if (!same_layer) texts.add(m.layer);
  if (!same_dtype) texts.add(m.dtype);
  const bool sharded = m.shard_bytes != 0;
  numbers.add(static_cast<int64_t>(m.route) | sharded << 8).add(m.batch).add(m.rows).add(m.cols);
  numbers.add(m.state_bytes);
  if (sharded) numbers.add(m.shard_bytes);
}

void sort_by_name(std::vector<Matrix>& matrices) {
  permute(matrices, order_by_name(names_of(matrices)));
}

}  // namespace dmuon

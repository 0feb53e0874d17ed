// Checks the balance of plans of known models on jobs of 8 to 10,000 ranks. One JSON line per plan;
// read by balance.py.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "benchmarks/plan/lists.h"
#include "benchmarks/plan/yardstick.h"

namespace {

using dmuon::Matrix;
using dmuon::Mesh;
using dmuon::OwnershipPlan;
namespace bench = dmuon::bench;

struct Model {
  const char* name;
  std::vector<Matrix> (*list)(int64_t tp);
};

constexpr Model kModels[] = {{"GPT-2", bench::gpt2},
                             {"Llama-3 8B", bench::llama3_8b},
                             {"Llama-3 70B", bench::llama3_70b},
                             {"Qwen3-30B-A3B", bench::qwen3_30b_a3b},
                             {"DeepSeek-V3-like", bench::deepseek_v3}};

constexpr Mesh kMeshes[] = {{.shard = 8},
                            {.shard = 2, .replicate = 2, .tp = 2},
                            {.shard = 64},
                            {.shard = 8, .replicate = 2, .tp = 4},
                            {.replicate = 8, .tp = 8},
                            {.shard = 512},
                            {.shard = 16, .replicate = 4, .tp = 8},
                            {.shard = 10'000},
                            {.shard = 1'250, .tp = 8},
                            {.shard = 2, .replicate = 1'250, .tp = 4}};

const char* told(bench::Optimum optimum) {
  if (optimum == bench::Optimum::bound_met) return "bound met";
  return optimum == bench::Optimum::proved ? "proved" : "open";
}

// The largest state of a rank over the mean, and over what some rank must hold at least.
struct State {
  double over_mean = 0, over_bound = 0;
};

State state_of(const OwnershipPlan& plan) {
  const std::vector<int64_t> held = plan.state_bytes();
  const double mean =
      std::accumulate(held.begin(), held.end(), 0.0) / static_cast<double>(held.size());
  double bound = mean;
  for (const Matrix& m : plan.matrices) {
    bound = std::max(bound, static_cast<double>(m.state_bytes + m.shard_bytes));
  }
  const auto most = static_cast<double>(*std::max_element(held.begin(), held.end()));
  return {most / mean, most / bound};
}

void measure(const Model& model, const Mesh& mesh) {
  const std::vector<Matrix> list = model.list(mesh.tp);
  const OwnershipPlan plan = dmuon::make_plan(list, mesh, {});
  bench::require_sound(plan, list.size());
  const dmuon::PlanReport& r = plan.report;
  const State state = state_of(plan);
  std::printf(
      "{\"model\": \"%s\", \"matrices\": %zu, \"costs\": %zu, \"shard\": %lld, "
      "\"replicate\": %lld, \"tp\": %lld, \"over_bound\": %.6f, \"lpt_over_bound\": %.6f, "
      "\"optimum\": \"%s\", \"cell_over_lpt\": %.6f, \"state_over_mean\": %.4f, "
      "\"state_over_bound\": %.4f}\n",
      model.name, list.size(), bench::different(plan.costs), static_cast<long long>(mesh.shard),
      static_cast<long long>(mesh.replicate), static_cast<long long>(mesh.tp),
      r.max_load / r.lower_bound, bench::plain_lpt(plan.costs, mesh.ranks()) / r.lower_bound,
      told(bench::optimum(plan)), bench::worst_cell_over_lpt(plan), state.over_mean,
      state.over_bound);
}

}  // namespace

int main() {
  for (const Model& model : kModels) {
    for (const Mesh& mesh : kMeshes) measure(model, mesh);
  }
}

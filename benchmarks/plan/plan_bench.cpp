// Times make_plan on long lists. One JSON line per list; read by bench_plan.py.
//
//   dmuon_plan_bench [names.tsv]   also writes the first list: name, rows, cols, for other planners
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <vector>

#include "benchmarks/plan/lists.h"
#include "benchmarks/plan/yardstick.h"
#include "engine/plan.h"

namespace {

using dmuon::make_plan;
using dmuon::Matrix;
using dmuon::Mesh;
using dmuon::OwnershipPlan;
namespace bench = dmuon::bench;

constexpr Mesh kFlat{.shard = 10'000};
constexpr Mesh kTp{.shard = 1'250, .tp = 8};

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

void measure(const char* name, const std::vector<Matrix>& list, const Mesh& mesh, int repeats) {
  double best_ms = 1e30;
  OwnershipPlan plan;
  for (int i = 0; i < repeats; ++i) {
    std::vector<Matrix> copy = list;
    const double start = cpu_ms();
    OwnershipPlan made = make_plan(std::move(copy), mesh, {});
    best_ms = std::min(best_ms, cpu_ms() - start);
    plan = std::move(made);
  }
  bench::require_sound(plan, list.size());
  const dmuon::PlanReport& r = plan.report;
  std::printf(
      "{\"list\": \"%s\", \"matrices\": %zu, \"ranks\": %lld, \"tp\": %lld, \"cpu_ms\": %.3f, "
      "\"max_over_mean\": %.4f, \"makespan_over_bound\": %.4f, \"lpt_over_bound\": %.4f}\n",
      name, list.size(), static_cast<long long>(mesh.ranks()), static_cast<long long>(mesh.tp),
      best_ms, r.max_load / r.mean_load, r.max_load / r.lower_bound,
      bench::plain_lpt(plan.costs, mesh.ranks()) / r.lower_bound);
}

void write(const char* path, const std::vector<Matrix>& list) {
  std::ofstream out(path);
  for (const Matrix& m : list) {
    out << m.name << '\t' << m.rows << '\t' << m.cols << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) write(argv[1], bench::experts(1));
  for (const Mesh& mesh : {kFlat, kTp}) {
    measure("experts", bench::experts(mesh.tp), mesh, 9);
    measure("random_shapes", bench::random_shapes(mesh.tp), mesh, 5);
    measure("deep_llama", bench::deep_llama(mesh.tp), mesh, 5);
  }
}

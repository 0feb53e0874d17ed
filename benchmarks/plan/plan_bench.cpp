// Times make_plan and measures its balance. One JSON line per list; read by bench_plan.py.
//
//   dmuon_plan_bench [names.tsv]   also writes the large list: name, rows, cols, for other planners
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <numeric>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "engine/plan.h"

namespace {

using dmuon::make_plan;
using dmuon::Matrix;
using dmuon::Mesh;
using dmuon::OwnershipPlan;
using dmuon::PlanPolicy;

using Shape = std::pair<const char*, std::pair<int64_t, int64_t>>;

void add_block(std::vector<Matrix>& list, const std::string& block,
               const std::vector<Shape>& shapes) {
  for (const auto& [name, size] : shapes) {
    const auto [rows, cols] = size;
    list.push_back({.name = block + "." + name + ".weight",
                    .unit = block,
                    .layer = block,
                    .rows = rows,
                    .cols = cols,
                    .state_bytes = 8 * rows * cols});
  }
}

std::vector<Matrix> dense(const std::string& prefix, int layers, const std::vector<Shape>& shapes) {
  std::vector<Matrix> list;
  for (int i = 0; i < layers; ++i) add_block(list, prefix + std::to_string(i), shapes);
  return list;
}

std::vector<Matrix> gpt2() {
  return dense("transformer.h.", 12,
               {{"attn.c_attn", {2304, 768}},
                {"attn.c_proj", {768, 768}},
                {"mlp.c_fc", {3072, 768}},
                {"mlp.c_proj", {768, 3072}}});
}

std::vector<Matrix> llama(int layers, int64_t d, int64_t kv, int64_t ffn) {
  return dense("model.layers.", layers,
               {{"self_attn.q_proj", {d, d}},
                {"self_attn.k_proj", {kv, d}},
                {"self_attn.v_proj", {kv, d}},
                {"self_attn.o_proj", {d, d}},
                {"mlp.gate_proj", {ffn, d}},
                {"mlp.up_proj", {ffn, d}},
                {"mlp.down_proj", {d, ffn}}});
}

// 128 layers of 259 experts, each of three matrices, and four of attention: 99,968; the router of
// the first 32 layers makes it 100,000.
std::vector<Matrix> experts() {
  std::vector<Matrix> list;
  for (int i = 0; i < 128; ++i) {
    const std::string block = "model.layers." + std::to_string(i);
    add_block(list, block,
              {{"self_attn.q_proj", {4096, 4096}},
               {"self_attn.k_proj", {1024, 4096}},
               {"self_attn.v_proj", {1024, 4096}},
               {"self_attn.o_proj", {4096, 4096}}});
    if (i < 32) add_block(list, block, {{"mlp.router", {259, 4096}}});
    for (int e = 0; e < 259; ++e) {
      const std::string expert = "mlp.experts." + std::to_string(e);
      const std::string gate = expert + ".gate_proj", up = expert + ".up_proj";
      const std::string down = expert + ".down_proj";
      add_block(
          list, block,
          {{gate.c_str(), {1536, 4096}}, {up.c_str(), {1536, 4096}}, {down.c_str(), {4096, 1536}}});
    }
  }
  return list;
}

// 100,000 different shapes: nothing to gain from equal costs.
std::vector<Matrix> random_shapes() {
  std::mt19937_64 random(7);
  std::vector<Matrix> list;
  for (int i = 0; i < 100'000; ++i) {
    const auto rows = static_cast<int64_t>(256 + random() % 8192);
    const auto cols = static_cast<int64_t>(256 + random() % 8192);
    add_block(list, "blocks." + std::to_string(i / 7),
              {{("m" + std::to_string(i % 7)).c_str(), {rows, cols}}});
  }
  return list;
}

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

double plain_lpt(std::vector<double> costs, int64_t slots) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  std::priority_queue<double, std::vector<double>, std::greater<>> loads(
      std::greater<>(), std::vector<double>(static_cast<size_t>(slots)));
  double largest = 0;
  for (double cost : costs) {
    const double load = loads.top() + cost;
    loads.pop();
    loads.push(load);
    largest = std::max(largest, load);
  }
  return largest;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "plan_bench: %s\n", what);
  std::exit(1);
}

void check(const OwnershipPlan& plan, size_t size) {
  require(plan.matrices.size() == size && plan.owners.size() == size, "a matrix is lost");
  size_t in_units = 0;
  for (const dmuon::Unit& unit : plan.units) {
    for (const dmuon::Segment& segment : unit.segments) in_units += segment.matrices.size();
  }
  require(in_units == size, "a matrix is in no unit, or in two");
  const std::vector<double> loads = plan.loads();  // faults on an owner outside the mesh
  std::vector<int32_t> counts(loads.size());
  for (int32_t owner : plan.owners) ++counts[owner];
  const auto [fewest, most] = std::minmax_element(counts.begin(), counts.end());
  require(*fewest > 0 || *most < 2, "a rank is idle while another holds two matrices");
  require(plan.report.max_load <= plain_lpt(plan.costs, plan.mesh.ranks()) * (1 + 1e-12),
          "worse than plain LPT");
  require(plan.report.lower_bound <= plan.report.max_load * (1 + 1e-12), "the bound is wrong");
}

void measure(const char* name, const std::vector<Matrix>& list, int64_t ranks, int repeats) {
  double best_ms = 1e30;
  OwnershipPlan plan;
  for (int i = 0; i < repeats; ++i) {
    std::vector<Matrix> copy = list;
    const double start = cpu_ms();
    OwnershipPlan made = make_plan(std::move(copy), Mesh{.shard = ranks}, PlanPolicy{});
    best_ms = std::min(best_ms, cpu_ms() - start);
    plan = std::move(made);
  }
  check(plan, list.size());
  const dmuon::PlanReport& r = plan.report;
  std::printf(
      "{\"list\": \"%s\", \"matrices\": %zu, \"ranks\": %lld, \"cpu_ms\": %.3f, "
      "\"max_over_mean\": %.4f, \"makespan_over_bound\": %.4f, \"lpt_over_bound\": %.4f, "
      "\"w_star\": %.1f}\n",
      name, list.size(), static_cast<long long>(ranks), best_ms, r.max_load / r.mean_load,
      r.max_load / r.lower_bound, plain_lpt(plan.costs, ranks) / r.lower_bound, r.w_star);
}

void write(const char* path, const std::vector<Matrix>& list) {
  std::ofstream out(path);
  for (const Matrix& m : list) {
    out << m.name << '\t' << m.rows << '\t' << m.cols << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Matrix> large = experts();
  if (argc > 1) write(argv[1], large);
  measure("experts", large, 10'000, 9);
  measure("random_shapes", random_shapes(), 10'000, 5);
  measure("dense_14286_layers", llama(14'286, 4096, 1024, 14336), 10'000, 5);
  for (int64_t ranks : {8, 64, 512, 10'000}) {
    measure("gpt2", gpt2(), ranks, 1);
    measure("llama3_8b", llama(32, 4096, 1024, 14336), ranks, 1);
    measure("llama3_70b", llama(80, 8192, 1024, 28672), ranks, 1);
  }
}

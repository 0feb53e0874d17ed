#include "kernels/cpu/list.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include "kernels/cpu/norm.h"
#include "kernels/cpu/orthogonalise.h"
#include "kernels/cpu/self_check.h"
#include "kernels/cpu/threads.h"
#include "kernels/newton_schulz_mm.h"

namespace dmuon::cpu {
namespace {

struct Item {
  Recipe recipe;
  View in, out;
  double cost;
};

// The i-th matrix of a tensor of them, its short dim as rows.
View view_of(const at::Tensor& x, int64_t i) {
  const int64_t rows = x.size(-2), cols = x.size(-1);
  char* data = static_cast<char*>(x.data_ptr());
  if (x.dim() == 3) data += i * x.stride(0) * x.element_size();
  const View view = {data, x.scalar_type(), rows, cols, x.stride(-2), x.stride(-1)};
  return rows <= cols ? view : view.transposed();
}

// Rows in one piece, as the norm adds them up: the bits depend on no stride.
at::Tensor row_by_row(const at::Tensor& x) {
  return x.stride(-1) == 1 || x.scalar_type() == at::kDouble ? x : x.contiguous();
}

// By what to divide is only known in float64 here: norms whose inverse or whose elements float32
// has no place for.
bool is_extreme(double norm) { return norm < 0x1p-100 || norm > 0x1p100; }

void run_scaled(const TileKernels& kernels, const Item& item, const Team& team) {
  std::vector<float> copy = scaled_copy(kernels, item.out.wide() ? item.in : item.in.transposed());
  View in = item.out;
  in.data = copy.data();
  in.dtype = at::kFloat;
  const double squares = sum_of_squares(kernels, in, team.count);
  if (!std::isfinite(squares))
    return fill(kernels, item.out, std::numeric_limits<float>::quiet_NaN());
  if (squares == 0) return fill(kernels, item.out, 0);
  orthogonalise(kernels, item.recipe, in, item.out, static_cast<float>(1 / std::sqrt(squares)),
                team);
}

void run(const Item& item, const Team& team) {
  const TileKernels& kernels = tile_kernels(item.recipe.isa);
  if (item.in.dtype == at::kDouble) return run_scaled(kernels, item, team);
  const double squares = sum_of_squares(kernels, item.in, team.count);
  if (!std::isfinite(squares))
    return fill(kernels, item.out, std::numeric_limits<float>::quiet_NaN());
  if (squares == 0) return fill(kernels, item.out, 0);
  const double norm = std::sqrt(squares);
  if (is_extreme(norm)) return run_scaled(kernels, item, team);
  orthogonalise(kernels, item.recipe, item.in, item.out, static_cast<float>(1 / norm), team);
}

void append(std::vector<Item>& items, const NsJob& job, const Recipe& recipe) {
  const int64_t batch = job.in.dim() == 3 ? job.in.size(0) : 1;
  const double cost = true_flops(recipe, job.in.size(-2), job.in.size(-1));
  for (int64_t i = 0; i < batch; ++i) {
    items.push_back({recipe, view_of(job.in, i), view_of(job.out, i), cost});
  }
}

void reserve(std::vector<Arena>& arenas, const std::vector<Item>& items, int64_t shared,
             int threads) {
  std::vector<int64_t> floats(threads, 0);
  for (size_t i = 0; i < items.size(); ++i) {
    const Item& item = items[i];
    const Demand need = demand(tile_kernels(item.recipe.isa), item.recipe, item.in, item.out);
    const bool by_all = static_cast<int64_t>(i) < shared;
    for (int t = 0; t < threads; ++t) {
      floats[t] = std::max(floats[t], t == 0 || !by_all ? need.first : need.others);
    }
  }
  for (int t = 0; t < threads; ++t) arenas[t].reserve(floats[t]);
}

void run_all(std::vector<Item> items, NsWorkspace& workspace) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.cost > b.cost; });
  std::vector<double> costs;
  for (const Item& item : items) costs.push_back(item.cost);
  const int threads = usable_threads();
  const int64_t shared = shared_first(costs, threads);
  const auto beside = static_cast<int64_t>(items.size()) - shared;
  std::vector<Arena>& arenas = workspace.arenas(threads);
  reserve(arenas, items, shared, threads);
  for (int64_t i = 0; i < shared; ++i) run(items[i], {arenas, 0, threads});
  for_each(threads, beside, [&](int64_t i, int thread) {
    run(items[shared + i], {arenas, thread, 1});
  });
}

double time_side_by_side(const std::vector<double>& costs, int64_t begin, int threads) {
  std::priority_queue<double, std::vector<double>, std::greater<>> loads(
      std::greater<>(), std::vector<double>(threads, 0));
  double latest = 0;
  for (size_t i = begin; i < costs.size(); ++i) {
    const double end = loads.top() + costs[i];
    loads.pop();
    loads.push(end);
    latest = std::max(latest, end);
  }
  return latest;
}

}  // namespace

int64_t shared_first(const std::vector<double>& costs, int threads) {
  if (threads == 1) return 0;
  const auto most = std::min<int64_t>(static_cast<int64_t>(costs.size()), 4 * threads);
  double shared = 0, best = std::numeric_limits<double>::infinity();
  int64_t first = 0;
  for (int64_t i = 0; i <= most; ++i) {
    const double time = shared + time_side_by_side(costs, i, threads);
    if (time < best) {
      best = time;
      first = i;
    }
    if (i < most) shared += costs[i] / (0.9 * threads);
  }
  return first;
}

void newton_schulz_list(const std::vector<NsJob>& jobs, const NewtonSchulz& options,
                        NsWorkspace& workspace) {
  std::vector<Item> items;
  std::vector<at::Tensor> readable;
  for (const NsJob& job : jobs) {
    const int64_t rows = job.in.size(-2), cols = job.in.size(-1);
    const Recipe recipe = recipe_for(rows, cols, options);
    if (!trusted(recipe, rows, cols)) {
      job.out.copy_(newton_schulz_mm(job.in, options));
      continue;
    }
    readable.push_back(row_by_row(job.in));
    append(items, {readable.back(), job.out}, recipe);
  }
  run_all(std::move(items), workspace);
}

std::string newton_schulz_name(int64_t batch, int64_t rows, int64_t cols,
                               const NewtonSchulz& options) {
  const Recipe recipe = recipe_for(rows, cols, options);
  if (not_distrusted(recipe, rows, cols)) return recipe_name(recipe);
  return newton_schulz_mm_name(batch, rows, cols, options);
}

}  // namespace dmuon::cpu

#include "tests/support/tiny_unit.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace dmuon::testing {
namespace {

Matrix matrix_of(const TinyMatrix& tiny) {
  const size_t dims = tiny.sizes.size();
  return {.name = tiny.name,
          .unit = "unit",
          .batch = dims == 3 ? tiny.sizes[0] : 1,
          .rows = tiny.sizes[dims - 2],
          .cols = tiny.sizes[dims - 1]};
}

// One segment per owner, as make_plan writes them.
std::vector<Segment> segments_of(const OwnershipPlan& plan) {
  std::map<int32_t, Segment> by_owner;
  for (int32_t m = 0; m < static_cast<int32_t>(plan.matrices.size()); ++m) {
    Segment& segment = by_owner[plan.owners[m]];
    segment.owner = plan.owners[m];
    segment.matrices.push_back(m);
  }
  std::vector<Segment> segments;
  for (auto& [owner, segment] : by_owner) segments.push_back(std::move(segment));
  return segments;
}

}  // namespace

TinyUnit::TinyUnit(const Mesh& mesh, const std::vector<TinyMatrix>& matrices) {
  std::vector<Matrix> planned;
  std::ranges::transform(matrices, std::back_inserter(planned), matrix_of);
  plan_ = make_plan(std::move(planned), mesh, {});
  layouts_.resize(matrices.size());
  sizes_.resize(matrices.size());
  for (const TinyMatrix& tiny : matrices) {
    const int m = index(tiny.name);
    plan_.owners[m] = tiny.owner;
    plan_.tp_owners[m] = tiny.tp_owner;
    layouts_[m] = tiny.layout;
    sizes_[m] = tiny.sizes;
  }
  plan_.units[0].segments = segments_of(plan_);
}

UnitStore TinyUnit::store(const Position& me) const {
  UnitStore store(plan_, 0, me, layouts_);
  for (int s = 0; s < static_cast<int>(store.slots().size()); ++s) {
    const int m = store.slots()[s].matrix;
    const auto sizes = layouts_[m].cut() ? layouts_[m].sizes_on(me.tp) : sizes_[m];
    const at::Tensor parameter = at::zeros(sizes).set_requires_grad(true);
    store.adopt(s, parameter, parameter, {});
  }
  return store;
}

int slot_of(const UnitStore& store, const TinyUnit& unit, const std::string& name) {
  const auto found = std::ranges::find(store.slots(), unit.index(name), &Slot::matrix);
  return static_cast<int>(found - store.slots().begin());
}

at::Tensor some_integers(const std::vector<int64_t>& sizes, int seed) {
  const int64_t numel =
      std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  const at::Tensor index = at::arange(numel, at::kLong);
  return ((index * 37 + 11 * seed).remainder(23) - 9).view(sizes).to(at::kFloat);
}

}  // namespace dmuon::testing

// One unit of some matrices, as its store is on each rank of a mesh.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "engine/unit_store.h"
#include "tests/support/tiny_mesh.h"

namespace dmuon::testing {

struct TinyMatrix {
  std::string name;
  std::vector<int64_t> sizes;  // [rows, cols] or [batch, rows, cols]
  TpLayout layout{};           // not cut
  int tp_owner = 0;
  int owner = 0;  // cell
};

class TinyUnit {
 public:
  TinyUnit(const Mesh& mesh, const std::vector<TinyMatrix>& matrices);

  const OwnershipPlan& plan() const { return plan_; }
  // With parameters of zeros in this rank's sizes.
  UnitStore store(const Position& me) const;
  // Its index in the plan, and in the unit where all have one owner.
  int index(const std::string& name) const { return plan_.find(name); }
  const TpLayout& layout(const std::string& name) const { return layouts_[index(name)]; }

 private:
  OwnershipPlan plan_;
  std::vector<TpLayout> layouts_;
  std::vector<std::vector<int64_t>> sizes_;
};

int slot_of(const UnitStore& store, const TinyUnit& unit, const std::string& name);

// Small integers in float32, whose sums are exact; a function of seed alone.
at::Tensor some_integers(const std::vector<int64_t>& sizes, int seed);

}  // namespace dmuon::testing

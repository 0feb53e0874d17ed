// Who owns which matrix, and what moves together: decided once, before anything runs.
//
// A pure function of shapes, mesh and policy. No torch, no communication: every rank computes the
// same plan alone, whatever order its modules are registered in, and ranks compare digests.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/digest.h"

namespace dmuon {

enum class Route { muon, adamw };

// One dedicated parameter as the planner sees it.
struct Matrix {
  std::string name;   // fully qualified; the smallest of them where a weight is tied
  std::string unit;   // name of its hook boundary; matrices of one unit move together
  std::string layer;  // the repeated block it belongs to, "" for none (see layer_of)
  int64_t batch = 1;  // Newton-Schulz sees `batch` matrices of rows x cols
  int64_t rows = 0;
  int64_t cols = 0;
  // Bytes on its TP owner alone: momentum. On the adamw route there is no TP owner, and they are
  // cut evenly over the TP ranks of the owner cell. Without tensor parallelism all may stand here:
  // weight, fp32 master where it differs, momentum.
  int64_t state_bytes = 0;
  // Bytes on every TP rank of the owner cell: its shard of the weight and of the master, and of the
  // moments on the adamw route; whole ones where the weight is not sharded. Of uneven shards, the
  // largest.
  int64_t shard_bytes = 0;
  Route route = Route::muon;
  std::string dtype = "float32";  // part of the digest only

  int64_t numel() const { return batch * rows * cols; }
};

// The axes of a job. An owner is one *cell*: a coordinate of the two data-parallel axes, written as
// one number, replicate * shard_size + shard. A cell has `tp` tensor-parallel ranks. One of them,
// the TP owner, runs Newton-Schulz; on the adamw route all of them update their shards.
struct Mesh {
  int64_t shard = 1;
  int64_t replicate = 1;
  int64_t tp = 1;
  int64_t cells() const { return shard * replicate; }
  int64_t ranks() const { return cells() * tp; }
};

enum class OwnerStrategy { lpt, round_robin };
enum class CostModel { optimizer, numel };

struct PlanPolicy {
  OwnerStrategy strategy = OwnerStrategy::lpt;
  CostModel cost_model = CostModel::optimizer;
  // At most this many owner cells within one unit, since each costs one transfer over the
  // data-parallel axes; the TP ranks inside a cell share that transfer. 0: no limit.
  int64_t max_owners_per_group = 0;
  // Of state_bytes and shard_bytes on one rank; 0: no limit. Kept exactly, but for uneven shards,
  // which count as the largest.
  int64_t memory_limit_bytes = 0;
  bool pack = true;  // one transfer per (unit, owner); false: one per matrix
  int ns_steps = 5;
  bool symmetric_products = true;  // as our kernels on the CPU; false: as torch's products
  bool direct = false;             // ns_backend="direct": the direct iteration, not gram
};

// Floating-point operations of one Newton-Schulz of this matrix, one multiply-add counting as two.
// The source of the formulas stands in cost.cpp.
double newton_schulz_flops(const Matrix& matrix, const PlanPolicy& policy);

// What owners are balanced by: the operations of a large product that take as long. On the adamw
// route, those that fit into the time of its AdamW step. Constants, the same on every rank whatever
// its processor, and whole numbers.
double newton_schulz_cost(const Matrix& matrix, const PlanPolicy& policy);

// The unit's matrices of one owner: adjacent in the unit's buffers.
struct Segment {
  int32_t owner = 0;
  std::vector<int32_t> matrices;  // indices into OwnershipPlan::matrices, by name
};

struct Unit {
  std::string name;
  std::vector<Segment> segments;  // by owner (pack), else one per matrix, by name
};

struct PlanReport {
  double max_load = 0;     // FLOPs of the costliest owner
  double mean_load = 0;    // over all ranks
  double w_star = 0;       // total / largest cost on one rank: more ranks than this cannot help
  double lower_bound = 0;  // no assignment has a smaller max_load
  int64_t max_state_bytes = 0;
  int64_t state_bytes_bound = 0;  // the proven bound on max_state_bytes, or the limit where given
};

struct OwnershipPlan {
  Mesh mesh;
  PlanPolicy policy;
  std::vector<Matrix> matrices;    // sorted by name
  std::vector<double> costs;       // per matrix
  std::vector<int32_t> owners;     // per matrix, a cell
  std::vector<int32_t> tp_owners;  // per matrix, in [0, mesh.tp); 0 on the adamw route
  std::vector<Unit> units;         // sorted by name
  PlanReport report;
  Digest digest;

  // Index into `matrices`, or -1.
  int32_t find(std::string_view name) const;
  // Per rank, which is cell * tp + TP coordinate. A matrix on the adamw route counts on all TP
  // ranks of its cell.
  std::vector<double> loads() const;         // FLOPs
  std::vector<int64_t> state_bytes() const;  // what memory_limit_bytes limits
};

// Throws ConfigError: a name twice, a dimension below 0, an empty list, a mesh axis below 1, a
// memory limit that no assignment can keep.
OwnershipPlan make_plan(std::vector<Matrix> matrices, const Mesh& mesh, const PlanPolicy& policy);

// The layer of a parameter: the path of its outermost ancestor that is a child of a repeated
// container. `containers` are the paths of all ModuleList and Sequential modules.
//   layer_of("net.blocks.3.mlp.fc.weight", {"net.blocks", "net.blocks.3.mlp"}) == "net.blocks.3"
std::string layer_of(std::string_view parameter, const std::vector<std::string>& containers);

}  // namespace dmuon

// The matrices of a plan brought into name order and read once. Not for users of plan.h.
#pragma once
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/digest.h"
#include "engine/plan.h"

namespace dmuon {

// Texts as numbers; equal texts have equal numbers.
class Ids {
 public:
  // `same`: as the one before, which neighbours in name order mostly are.
  void add(std::string_view text, bool same) {
    of_matrix.push_back(same ? of_matrix.back() : find(text));
  }
  void renumber_by_name();

  std::vector<int32_t> of_matrix;
  std::vector<std::string_view> names;  // by number

 private:
  int32_t find(std::string_view text);

  std::unordered_map<std::string_view, int32_t> known_;
};

// Whether every TP rank of the owner cell updates its own shard, so that no TP owner is needed.
inline bool elementwise(const Matrix& m, const Mesh& mesh) {
  return mesh.tp > 1 && m.route == Route::adamw;
}

// Bytes of a matrix on its TP owner, and on every TP rank of its cell.
struct Held {
  int64_t own = 0, everywhere = 0;
};

inline Held held(const Matrix& m, const Mesh& mesh) {
  if (mesh.tp == 1) return {m.state_bytes + m.shard_bytes, 0};
  if (!elementwise(m, mesh)) return {m.state_bytes, m.shard_bytes};
  return {0, m.shard_bytes + (m.state_bytes + mesh.tp - 1) / mesh.tp};
}

// What planning needs of the matrices, side by side. They are large and far apart, and reading them
// is where planning a long list spends its time: it happens once.
class Reader {
 public:
  // `sorted` by name, stays where it is as long as the ids are used. Throws ConfigError: a name
  // twice, a size below 0.
  Reader(const std::vector<Matrix>& sorted, const Mesh& mesh, const PlanPolicy& policy);

  Ids units, layers;
  std::vector<double> costs;
  std::vector<double> weights;      // to be balanced, where those are not the costs
  std::vector<int64_t> bytes;       // Held::own
  std::vector<int64_t> cell_bytes;  // Held::everywhere; empty without tensor parallelism
  std::vector<char> shared;         // elementwise(); empty where none is
  Hasher texts, numbers;            // two chains run side by side

 private:
  void add(const Matrix& m, const Matrix* before, const Mesh& mesh, const PlanPolicy& policy);
  void add_bytes(const Matrix& m, const Mesh& mesh);
  void add_digest(const Matrix& m, const Matrix* before);
};

void sort_by_name(std::vector<Matrix>& matrices);

}  // namespace dmuon

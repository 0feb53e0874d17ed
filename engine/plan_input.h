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

// What planning needs of the matrices, side by side. They are large and far apart, and reading them
// is where planning a long list spends its time: it happens once.
class Reader {
 public:
  // `sorted` by name, stays where it is as long as the ids are used. Throws ConfigError: a name
  // twice, a size below 0.
  Reader(const std::vector<Matrix>& sorted, const PlanPolicy& policy);

  Ids units, layers;
  std::vector<double> costs;
  std::vector<double> weights;  // to be balanced, where those are not the costs
  std::vector<int64_t> bytes;
  Hasher texts, numbers;  // two chains run side by side

 private:
  void add(const Matrix& m, const Matrix* before, const PlanPolicy& policy);
};

void sort_by_name(std::vector<Matrix>& matrices);

}  // namespace dmuon

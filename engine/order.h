// Sorting for the planner: stable, and linear in what has to be looked at.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace dmuon {

struct Keyed {
  uint64_t key = 0;
  int32_t index = 0;
};

// By key, equal keys in the order given.
void sort_by_key(std::span<Keyed> items);

// Indices of `names` in lexicographic order of their bytes, equal names in the order given.
std::vector<int32_t> order_by_name(const std::vector<std::string_view>& names);

// Indices of `values` (>= 0) from the largest down, equal values in the order given.
std::vector<int32_t> order_descending(const std::vector<double>& values);

}  // namespace dmuon

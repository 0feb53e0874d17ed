// Sorting for the planner: stable, and linear in what has to be looked at.
#pragma once
#include <compare>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace dmuon {

struct Keyed {
  uint64_t key = 0;
  int32_t index = 0;
  auto operator<=>(const Keyed&) const = default;
};

// By key, then by index; items of equal keys must come with rising indices. `scratch` is resized.
void sort_by_key(std::span<Keyed> items, std::vector<Keyed>& scratch);

// Indices of `names` in lexicographic order of their bytes, equal names in the order given.
std::vector<int32_t> order_by_name(const std::vector<std::string_view>& names);

// Indices of `values` (>= 0) from the largest down, equal values in the order given.
std::vector<int32_t> order_descending(const std::vector<double>& values);

}  // namespace dmuon

// Where a rank stands in the job, and where a matrix lies on the tensor-parallel ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

namespace dmuon {

// On the axes of the plan's mesh; each is the rank in that axis' process group.
struct Position {
  int shard = 0;
  int replicate = 0;
  int tp = 0;
};

// How one matrix is cut over the TP ranks of a cell.
struct TpLayout {
  struct Range {
    int64_t start = 0, length = 0;
  };
  int dim = -1;                            // cut along this dim; -1: whole on every TP rank
  std::vector<int64_t> sizes;              // of the whole; empty where it is not cut
  std::vector<std::vector<Range>> ranges;  // per TP rank: the indices of `dim` it holds, in order

  bool cut() const { return dim >= 0; }

  std::vector<int64_t> sizes_on(int tp) const {
    std::vector<int64_t> local = sizes;
    local[dim] = 0;
    for (const Range& range : ranges[tp]) local[dim] += range.length;
    return local;
  }

  int64_t numel_on(int tp) const {
    const std::vector<int64_t> local = sizes_on(tp);
    return std::accumulate(local.begin(), local.end(), int64_t{1}, std::multiplies<>());
  }
};

}  // namespace dmuon

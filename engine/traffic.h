// What one rank is charged for a collective, in bytes sent. Summed over the ranks it is the traffic
// of the operation: which rank sends which part differs between algorithms, the sum does not.
#pragma once
#include <cstdint>

namespace dmuon {

struct Traffic {
  int rank = 0;
  int size = 1;

  // Every other rank receives the tensor once, directly or along a tree: charged to the root.
  int64_t broadcast(int root, int64_t tensor_bytes) const {
    return rank == root ? (size - 1) * tensor_bytes : 0;
  }

  // A ring: (n-1)/n of the tensor is reduced, as much gathered, by every rank. The remainder of the
  // division goes to the first ranks, so that the sum is exact.
  int64_t all_reduce(int64_t tensor_bytes) const {
    const int64_t total = 2 * (size - 1) * tensor_bytes;
    return total / size + (rank < total % size ? 1 : 0);
  }

  // Every rank's part reaches every other rank.
  int64_t all_gather(int64_t part_bytes) const { return (size - 1) * part_bytes; }
};

}  // namespace dmuon

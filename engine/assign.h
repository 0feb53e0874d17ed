// Which slot owns which matrix: the load balancing under the plan, on numbers only.
//
// Deterministic and bounded: the same problem gives the same owners everywhere, and no search runs
// longer than a fixed number of steps. Ties go by index, so the caller indexes by name.
#pragma once
#include <cstdint>
#include <vector>

namespace dmuon {

struct AssignProblem {
  std::vector<double> costs;    // >= 0
  std::vector<int64_t> bytes;   // >= 0, held by the owner
  std::vector<int32_t> units;   // ids from 0
  std::vector<int32_t> layers;  // ids from 0; -1: none
  int64_t slots = 1;
  int64_t memory_limit = 0;  // bytes on one slot; 0: none
  int64_t max_owners = 0;    // of one unit's matrices; 0: no limit

  int32_t size() const { return static_cast<int32_t>(costs.size()); }
  bool constrained() const { return memory_limit > 0 || max_owners > 0; }
};

// Longest processing time first, then a local search that makes the costliest slot cheaper, then
// swaps that spread the matrices of a unit and of a layer over slots without making it costlier
// again. The largest load is never above that of LPT alone. Without `max_owners` no slot is idle
// while another holds two matrices. Throws ConfigError: no owners found within `memory_limit`.
std::vector<int32_t> assign_lpt(const AssignProblem& problem);

// Matrix i on slot i mod slots, or the next one that keeps the limits. Throws ConfigError likewise.
std::vector<int32_t> assign_round_robin(const AssignProblem& problem);

// No assignment has a smaller largest load: the largest cost, the mean, and, because one of `slots`
// holds k + 1 of any k * slots + 1 matrices, the k + 1 cheapest of the costliest k * slots + 1.
double makespan_bound(const std::vector<double>& costs, int64_t slots);

std::vector<double> sum_per_slot(const std::vector<double>& values,
                                 const std::vector<int32_t>& owners, int64_t slots);
std::vector<int64_t> sum_per_slot(const std::vector<int64_t>& values,
                                  const std::vector<int32_t>& owners, int64_t slots);

}  // namespace dmuon

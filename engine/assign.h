// Which slot owns which matrix: the load balancing under the plan, on numbers only.
//
// Deterministic and bounded: the same problem gives the same owners everywhere, and no search runs
// longer than a fixed number of steps. Ties go by index, so the caller indexes by name.
#pragma once
#include <cstdint>
#include <vector>

namespace dmuon {

// Slots may form cells, the tensor-parallel ranks of one coordinate: slots s, s + cells,
// s + 2 * cells and so on. So slots taken in rising order fill all cells evenly.
struct AssignProblem {
  std::vector<double> costs;        // >= 0, on each slot that works on the matrix
  std::vector<int64_t> bytes;       // >= 0, held by the owner
  std::vector<int64_t> cell_bytes;  // >= 0, held by every slot of the owner's cell; empty: none
  std::vector<char> shared;         // 1: every slot of the cell works on it; empty: none
  std::vector<int32_t> units;       // ids from 0
  std::vector<int32_t> layers;      // ids from 0; -1: none
  int64_t slots = 1;
  int64_t cells = 0;         // divides `slots`; 0: each slot is a cell
  int64_t memory_limit = 0;  // bytes on one slot; 0: none
  int64_t max_owners = 0;    // cells with matrices of one unit; 0: no limit

  int32_t size() const { return static_cast<int32_t>(costs.size()); }
  bool constrained() const { return memory_limit > 0 || max_owners > 0; }
  int64_t cell_count() const { return cells > 0 ? cells : slots; }
  int32_t cell(int32_t slot) const { return cells > 0 ? static_cast<int32_t>(slot % cells) : slot; }
  bool is_shared(int32_t item) const { return !shared.empty() && shared[item] != 0; }
};

// Longest processing time first, then a local search that makes the costliest slot cheaper, then
// swaps that spread the matrices of a unit and of a layer over slots without making it costlier
// again. The largest load is never above that of LPT alone. Without `max_owners` no slot is idle
// while another holds two matrices. A shared matrix gets a slot that stands for its cell.
//
// Without `memory_limit`, no cell has a larger load than LPT on its slots and its matrices.
//
// Throws ConfigError: no owners found within `memory_limit`.
std::vector<int32_t> assign_lpt(const AssignProblem& problem);
// `order`: order_descending(problem.costs), for who has it already.
std::vector<int32_t> assign_lpt(const AssignProblem& problem, const std::vector<int32_t>& order);

// Matrix i on slot i mod slots, or the next one that keeps the limits. Throws ConfigError likewise.
std::vector<int32_t> assign_round_robin(const AssignProblem& problem);

// No assignment has a smaller largest load: the largest cost, the mean, and, because one of `slots`
// holds k + 1 of any k * slots + 1 matrices, the k + 1 cheapest of the costliest k * slots + 1.
double makespan_bound(const std::vector<double>& costs, int64_t slots);
// The same, for who has the order of falling costs already.
double makespan_bound(const std::vector<double>& costs, const std::vector<int32_t>& order,
                      int64_t slots);
// With shared matrices too: each kind alone, and the mean of both.
double makespan_bound(const AssignProblem& problem, const std::vector<int32_t>& order);

// A shared matrix counts on every slot of its cell.
std::vector<double> slot_loads(const AssignProblem& problem, const std::vector<int32_t>& owners);
std::vector<int64_t> slot_bytes(const AssignProblem& problem, const std::vector<int32_t>& owners);

std::vector<double> sum_per_slot(const std::vector<double>& values,
                                 const std::vector<int32_t>& owners, int64_t slots);
std::vector<int64_t> sum_per_slot(const std::vector<int64_t>& values,
                                  const std::vector<int32_t>& owners, int64_t slots);

}  // namespace dmuon

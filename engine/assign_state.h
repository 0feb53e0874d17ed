// An assignment under construction, shared by the steps of assign.cpp. Not for other users.
#pragma once
#include <cstdint>
#include <tuple>
#include <vector>

#include "engine/assign.h"

namespace dmuon::assign {

inline constexpr int32_t kNone = -1;

// What one slot has so far. The cheapest comes first, then the one with fewest matrices.
struct Load {
  double load = 0;
  int32_t count = 0;
  int32_t index = 0;  // of the slot
  bool operator<(const Load& other) const {
    return std::tie(load, count, index) < std::tie(other.load, other.count, other.index);
  }
};

std::vector<Load> empty_loads(int64_t count);

// What every slot holds, as matrices are placed one by one: exact, cells included.
class Memory {
 public:
  explicit Memory(const AssignProblem& problem);

  bool fits(int32_t item, int32_t slot) const;
  // Whether the slot has room for this many bytes of its own.
  bool has_room(int32_t slot, int64_t bytes) const;
  void add(int32_t item, int32_t slot);

 private:
  int64_t cell_bytes(int32_t item) const;

  const AssignProblem& problem_;
  std::vector<int64_t> own_;          // per slot
  std::vector<int64_t> everywhere_;   // per cell: held by each of its slots
  std::vector<int64_t> largest_own_;  // per cell: of its slots
};

// The matrices of each slot in a doubly linked list, with its load and bytes. None is shared.
class Slots {
 public:
  Slots(const AssignProblem& problem, std::vector<int32_t> owners);

  const AssignProblem& problem() const { return *problem_; }
  const std::vector<int32_t>& owners() const { return owners_; }
  int32_t count() const { return static_cast<int32_t>(loads_.size()); }
  double load(int32_t slot) const { return loads_[slot]; }
  double max_load() const;
  int64_t bytes(int32_t slot) const { return bytes_[slot]; }
  int32_t first(int32_t slot) const { return head_[slot]; }
  int32_t next(int32_t item) const { return next_[item]; }
  int32_t owner(int32_t item) const { return owners_[item]; }

  void move(int32_t item, int32_t slot);
  // `other` may be kNone: then `item` moves to `slot`, else the two change places.
  void exchange(int32_t item, int32_t other, int32_t slot);
  // Whether `exchange` keeps the memory limit, cells included, and the owner limit.
  bool allowed(int32_t item, int32_t other, int32_t slot) const;

  // Matrices of the slot in the unit or the layer of `item`, without `item` and `leaving`.
  int conflicts(int32_t item, int32_t slot, int32_t leaving = kNone) const;

 private:
  void link(int32_t item, int32_t slot);
  void unlink(int32_t item);
  bool within_memory(int32_t item, int32_t other, int32_t slot) const;
  // Whether the cell of `slot` keeps the limit with these bytes more.
  bool holds(int32_t slot, int64_t own, int64_t everywhere) const;
  bool within_owners(int32_t item, int32_t slot) const;
  int of_unit(int32_t unit, int32_t slot) const;  // in the cell of `slot`

  const AssignProblem* problem_;
  std::vector<int32_t> owners_, head_, next_, previous_;
  std::vector<double> loads_;
  std::vector<int64_t> bytes_;
  std::vector<int64_t> everywhere_;   // per cell, of cell_bytes; empty where there are none
  std::vector<int32_t> unit_owners_;  // cells per unit; kept only under an owner limit
};

// `order` has the costs falling.
std::vector<int32_t> plain_lpt(const AssignProblem& problem, const std::vector<int32_t>& order);
// These keep the limits; empty where no owners were found that do. `order` falls by cost.
std::vector<int32_t> limited_lpt(const AssignProblem& problem, const std::vector<int32_t>& order);
std::vector<int32_t> limited_round_robin(const AssignProblem& problem);
// `owners` with those of the shared matrices replaced, each by the cell where it costs least.
std::vector<int32_t> place_shared(const AssignProblem& problem, const std::vector<int32_t>& order,
                                  std::vector<int32_t> owners);

// plain_lpt or limited_lpt, and the search on it; empty where no owners were found. None is shared.
std::vector<int32_t> lpt_and_search(const AssignProblem& problem,
                                    const std::vector<int32_t>& order);
// `owners` after lowering the largest load of all slots. Keeps the limits; never raises the load.
std::vector<int32_t> search(const AssignProblem& problem, const std::vector<int32_t>& order,
                            std::vector<int32_t> owners);

bool within_memory(const AssignProblem& problem, const std::vector<int32_t>& owners);
double largest_load(const AssignProblem& problem, const std::vector<int32_t>& owners);

// Owners where some matrices are shared; empty where none were found.
std::vector<int32_t> lpt_with_shared(const AssignProblem& problem,
                                     const std::vector<int32_t>& order);
// Moves matrices between the slots of one cell, for every cell that can be better balanced alone.
void refine_cells(const AssignProblem& problem, const std::vector<int32_t>& order,
                  std::vector<int32_t>& owners);

// Moves and swaps between the costliest and the cheapest slots, until the largest load is `bound`,
// cannot be lowered this way, or the work is used up. Never raises the largest load.
void lower_makespan(Slots& slots, double bound);

// Small problems only: packs whole slots under a falling largest load, by bin completion with a
// bounded number of nodes. Keeps the memory limit. Returns owners with a largest load below that
// of `slots`, or an empty vector.
std::vector<int32_t> repack(const Slots& slots, double bound);

// The same search over bytes alone, first for cells, then in each: owners within the memory limit,
// or an empty vector.
std::vector<int32_t> pack_bytes(const AssignProblem& problem);

// Gives each idle slot a matrix of a slot that has two, the cheapest of the costliest such slot.
void fill_idle(Slots& slots);

// Swaps that lower the number of same-unit and same-layer pairs on one slot, with the largest load
// and the limits kept. `order` has the costs falling.
void spread(Slots& slots, const std::vector<int32_t>& order);

}  // namespace dmuon::assign

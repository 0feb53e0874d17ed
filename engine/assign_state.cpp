#include "engine/assign_state.h"

#include <algorithm>

namespace dmuon::assign {

Slots::Slots(const AssignProblem& problem, std::vector<int32_t> owners)
    : problem_(&problem),
      owners_(std::move(owners)),
      head_(problem.slots, kNone),
      next_(owners_.size(), kNone),
      previous_(owners_.size(), kNone),
      loads_(problem.slots),
      bytes_(problem.slots) {
  if (problem.max_owners > 0) {
    unit_owners_.resize(1 + *std::max_element(problem.units.begin(), problem.units.end()));
  }
  for (int32_t item = problem.size() - 1; item >= 0; --item) link(item, owners_[item]);
}

double Slots::max_load() const { return *std::max_element(loads_.begin(), loads_.end()); }

void Slots::link(int32_t item, int32_t slot) {
  if (!unit_owners_.empty() && of_unit(problem_->units[item], slot) == 0) {
    ++unit_owners_[problem_->units[item]];
  }
  owners_[item] = slot;
  previous_[item] = kNone;
  next_[item] = head_[slot];
  if (head_[slot] != kNone) previous_[head_[slot]] = item;
  head_[slot] = item;
  loads_[slot] += problem_->costs[item];
  bytes_[slot] += problem_->bytes[item];
}

void Slots::unlink(int32_t item) {
  const int32_t slot = owners_[item];
  (previous_[item] == kNone ? head_[slot] : next_[previous_[item]]) = next_[item];
  if (next_[item] != kNone) previous_[next_[item]] = previous_[item];
  loads_[slot] = 0;  // summed again rather than subtracted: no rounding gathers
  for (int32_t i = head_[slot]; i != kNone; i = next_[i]) loads_[slot] += problem_->costs[i];
  bytes_[slot] -= problem_->bytes[item];
  if (!unit_owners_.empty() && of_unit(problem_->units[item], slot) == 0) {
    --unit_owners_[problem_->units[item]];
  }
}

void Slots::move(int32_t item, int32_t slot) {
  unlink(item);
  link(item, slot);
}

void Slots::exchange(int32_t item, int32_t other, int32_t slot) {
  const int32_t from = owners_[item];
  move(item, slot);
  if (other != kNone) move(other, from);
}

bool Slots::allowed(int32_t item, int32_t other, int32_t slot) const {
  if (problem_->memory_limit > 0 && !within_memory(item, other, slot)) return false;
  if (problem_->max_owners == 0) return true;
  if (other != kNone && problem_->units[item] == problem_->units[other]) return true;
  return within_owners(item, other, slot) &&
         (other == kNone || within_owners(other, item, owners_[item]));
}

bool Slots::within_memory(int32_t item, int32_t other, int32_t slot) const {
  const int64_t delta = problem_->bytes[item] - (other == kNone ? 0 : problem_->bytes[other]);
  return bytes_[slot] + delta <= problem_->memory_limit &&
         bytes_[owners_[item]] - delta <= problem_->memory_limit;
}

bool Slots::within_owners(int32_t item, int32_t leaving, int32_t slot) const {
  const int32_t unit = problem_->units[item];
  const bool joins = of_unit(unit, slot) == 0;
  const bool leaves = of_unit(unit, owners_[item]) == 1;
  return unit_owners_[unit] + joins - leaves <= problem_->max_owners;
}

int Slots::of_unit(int32_t unit, int32_t slot) const {
  int count = 0;
  for (int32_t i = head_[slot]; i != kNone; i = next_[i]) count += problem_->units[i] == unit;
  return count;
}

int Slots::conflicts(int32_t item, int32_t slot, int32_t leaving) const {
  const int32_t unit = problem_->units[item], layer = problem_->layers[item];
  int count = 0;
  for (int32_t i = head_[slot]; i != kNone; i = next_[i]) {
    if (i == item || i == leaving) continue;
    count += problem_->units[i] == unit;
    count += layer != kNone && problem_->layers[i] == layer;
  }
  return count;
}

}  // namespace dmuon::assign

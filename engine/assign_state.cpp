#include "engine/assign_state.h"

#include <algorithm>
#include <utility>

namespace dmuon::assign {

std::vector<Load> empty_loads(int64_t count) {
  std::vector<Load> loads(count);
  for (int64_t i = 0; i < count; ++i) loads[i].index = static_cast<int32_t>(i);
  return loads;
}

Memory::Memory(const AssignProblem& problem)
    : problem_(problem),
      own_(problem.slots),
      everywhere_(problem.cell_count()),
      largest_own_(problem.cell_count()) {}

int64_t Memory::cell_bytes(int32_t item) const {
  return problem_.cell_bytes.empty() ? 0 : problem_.cell_bytes[item];
}

bool Memory::fits(int32_t item, int32_t slot) const {
  if (problem_.memory_limit == 0) return true;
  const int32_t cell = problem_.cell(slot);
  const int64_t own = std::max(largest_own_[cell], own_[slot] + problem_.bytes[item]);
  return everywhere_[cell] + cell_bytes(item) + own <= problem_.memory_limit;
}

bool Memory::has_room(int32_t slot, int64_t bytes) const {
  return problem_.memory_limit == 0 ||
         everywhere_[problem_.cell(slot)] + own_[slot] + bytes <= problem_.memory_limit;
}

void Memory::add(int32_t item, int32_t slot) {
  const int32_t cell = problem_.cell(slot);
  own_[slot] += problem_.bytes[item];
  everywhere_[cell] += cell_bytes(item);
  largest_own_[cell] = std::max(largest_own_[cell], own_[slot]);
}

Slots::Slots(const AssignProblem& problem, std::vector<int32_t> owners)
    : problem_(&problem),
      owners_(std::move(owners)),
      head_(problem.slots, kNone),
      next_(owners_.size(), kNone),
      previous_(owners_.size(), kNone),
      loads_(problem.slots),
      bytes_(problem.slots),
      everywhere_(problem.cell_bytes.empty() ? 0 : problem.cell_count()) {
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
  if (!everywhere_.empty()) everywhere_[problem_->cell(slot)] += problem_->cell_bytes[item];
}

void Slots::unlink(int32_t item) {
  const int32_t slot = owners_[item];
  (previous_[item] == kNone ? head_[slot] : next_[previous_[item]]) = next_[item];
  if (next_[item] != kNone) previous_[next_[item]] = previous_[item];
  loads_[slot] = 0;  // summed again rather than subtracted: no rounding gathers
  for (int32_t i = head_[slot]; i != kNone; i = next_[i]) loads_[slot] += problem_->costs[i];
  bytes_[slot] -= problem_->bytes[item];
  if (!everywhere_.empty()) everywhere_[problem_->cell(slot)] -= problem_->cell_bytes[item];
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
  return within_owners(item, slot) && (other == kNone || within_owners(other, owners_[item]));
}

bool Slots::within_memory(int32_t item, int32_t other, int32_t slot) const {
  const auto change = [&](const std::vector<int64_t>& bytes) {
    return bytes.empty() ? 0 : bytes[item] - (other == kNone ? 0 : bytes[other]);
  };
  const int32_t from = owners_[item];
  const bool same_cell = problem_->cell(from) == problem_->cell(slot);
  const int64_t own = change(problem_->bytes);
  const int64_t everywhere = same_cell ? 0 : change(problem_->cell_bytes);
  return holds(slot, own, everywhere) && holds(from, -own, -everywhere);
}

bool Slots::holds(int32_t slot, int64_t own, int64_t everywhere) const {
  int64_t left = problem_->memory_limit;
  if (everywhere_.empty()) return bytes_[slot] + own <= left;
  const auto cells = static_cast<int32_t>(problem_->cell_count());
  left -= everywhere_[problem_->cell(slot)] + everywhere;
  for (int32_t other = problem_->cell(slot); other < count(); other += cells) {
    if (bytes_[other] + (other == slot ? own : 0) > left) return false;
  }
  return true;
}

bool Slots::within_owners(int32_t item, int32_t slot) const {
  const int32_t unit = problem_->units[item];
  const bool joins = of_unit(unit, slot) == 0;
  const bool leaves = of_unit(unit, owners_[item]) == 1;
  return unit_owners_[unit] + joins - leaves <= problem_->max_owners;
}

int Slots::of_unit(int32_t unit, int32_t slot) const {
  const auto cells = static_cast<int32_t>(problem_->cell_count());
  int found = 0;
  for (int32_t other = problem_->cell(slot); other < count(); other += cells) {
    for (int32_t i = head_[other]; i != kNone; i = next_[i]) found += problem_->units[i] == unit;
  }
  return found;
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

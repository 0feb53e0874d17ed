#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/assign_state.h"

namespace dmuon::assign {
namespace {

constexpr double kRounding = 1e-12;  // relative: loads closer than this are equal
constexpr int kRounds = 64;          // of pairing costly slots with cheap ones
constexpr size_t kPartners = 32;     // cheap slots tried for one costly slot
constexpr int64_t kPairWork = 2'000'000;
constexpr int64_t kSpreadWork = 1'000'000;

struct Exchange {
  int32_t item = kNone, other = kNone;
  double larger = 0;  // of the two loads after it
};

class Pairing {
 public:
  Pairing(Slots& slots, double bound)
      : slots_(slots), bound_(bound), by_load_(slots.count()), used_(slots.count()) {
    std::iota(by_load_.begin(), by_load_.end(), 0);
  }

  // Whether the costliest slot became cheaper.
  bool round() {
    std::stable_sort(by_load_.begin(), by_load_.end(),
                     [&](int32_t a, int32_t b) { return slots_.load(a) > slots_.load(b); });
    std::fill(used_.begin(), used_.end(), false);
    cold_ = by_load_.size();
    const double target = std::max(bound_, slots_.load(by_load_.back())) * (1 + kRounding);
    size_t hot = 0;
    while (hot < cold_ && work_ > 0 && slots_.load(by_load_[hot]) > target && relieve(hot)) ++hot;
    return hot > 0;
  }

 private:
  bool relieve(size_t hot) {
    const int32_t slot = by_load_[hot];
    while (cold_ > hot + 1 && used_[by_load_[cold_ - 1]]) --cold_;
    size_t tried = 0;
    for (size_t cold = cold_; cold-- > hot + 1 && tried < kPartners;) {
      if (used_[by_load_[cold]]) continue;
      ++tried;
      const Exchange best = best_exchange(slot, by_load_[cold]);
      if (best.item == kNone) continue;
      slots_.exchange(best.item, best.other, by_load_[cold]);
      used_[by_load_[cold]] = true;
      return true;
    }
    return false;
  }

  Exchange best_exchange(int32_t hot, int32_t cold) {
    Exchange best{kNone, kNone, slots_.load(hot) * (1 - kRounding)};
    for (int32_t i = slots_.first(hot); i != kNone; i = slots_.next(i)) {
      consider(best, i, kNone, cold);
      for (int32_t j = slots_.first(cold); j != kNone; j = slots_.next(j))
        consider(best, i, j, cold);
    }
    return best;
  }

  void consider(Exchange& best, int32_t item, int32_t other, int32_t cold) {
    --work_;
    const std::vector<double>& costs = slots_.problem().costs;
    const double delta = costs[item] - (other == kNone ? 0 : costs[other]);
    if (delta <= 0) return;
    const double larger =
        std::max(slots_.load(slots_.owner(item)) - delta, slots_.load(cold) + delta);
    if (larger < best.larger && slots_.allowed(item, other, cold)) best = {item, other, larger};
  }

  Slots& slots_;
  double bound_;
  std::vector<int32_t> by_load_;
  std::vector<char> used_;  // took part in this round as the cheap one
  size_t cold_ = 0;         // all from here on are used
  int64_t work_ = kPairWork;
};

class Spreader {
 public:
  Spreader(Slots& slots, const std::vector<int32_t>& order)
      : slots_(slots), order_(order), place_(order.size()), limit_(slots.max_load()) {
    for (size_t i = 0; i < order.size(); ++i) place_[order[i]] = static_cast<int64_t>(i);
  }

  void run() {
    for (int32_t item : crowded()) {
      if (work_ <= 0) return;
      relieve(item);
    }
  }

 private:
  // Matrices that share their slot with an earlier one of their unit or layer.
  std::vector<int32_t> crowded() const {
    std::vector<int32_t> found;
    std::vector<int32_t> unit_seen = stamps(slots_.problem().units);
    std::vector<int32_t> layer_seen = stamps(slots_.problem().layers);
    for (int32_t slot = 0; slot < slots_.count(); ++slot) {
      for (int32_t i = slots_.first(slot); i != kNone; i = slots_.next(i)) {
        const int32_t layer = slots_.problem().layers[i];
        bool again = std::exchange(unit_seen[slots_.problem().units[i]], slot) == slot;
        if (layer != kNone) again |= std::exchange(layer_seen[layer], slot) == slot;
        if (again) found.push_back(i);
      }
    }
    return found;
  }

  static std::vector<int32_t> stamps(const std::vector<int32_t>& ids) {
    return std::vector<int32_t>(1 + std::max(0, *std::max_element(ids.begin(), ids.end())), kNone);
  }

  // Partners are looked for near it in the order of costs, then further and further away.
  void relieve(int32_t item) {
    const auto size = static_cast<int64_t>(order_.size());
    for (int64_t step = 1; step < size && work_ > 0; step += 1 + step / 3) {
      for (int64_t place : {place_[item] + step, place_[item] - step}) {
        if (place >= 0 && place < size && try_swap(item, order_[place])) return;
      }
    }
  }

  bool try_swap(int32_t item, int32_t other) {
    const int32_t here = slots_.owner(item), there = slots_.owner(other);
    if (here == there) return false;
    const double delta = slots_.problem().costs[item] - slots_.problem().costs[other];
    if (slots_.load(here) - delta > limit_ || slots_.load(there) + delta > limit_) return false;
    if (gain(item, other) <= 0 || !slots_.allowed(item, other, there)) return false;
    slots_.exchange(item, other, there);
    return slots_.conflicts(item, there) == 0;
  }

  int gain(int32_t item, int32_t other) {
    const int32_t here = slots_.owner(item), there = slots_.owner(other);
    const int before = slots_.conflicts(item, here) + slots_.conflicts(other, there);
    const int after = slots_.conflicts(item, there, other) + slots_.conflicts(other, here, item);
    work_ -= 4 * (1 + static_cast<int64_t>(order_.size()) / slots_.count());
    return before - after;
  }

  Slots& slots_;
  const std::vector<int32_t>& order_;
  std::vector<int64_t> place_;  // of each matrix in order_
  double limit_;
  int64_t work_ = kSpreadWork;
};

}  // namespace

void lower_makespan(Slots& slots, double bound) {
  Pairing pairing(slots, bound);
  for (int round = 0; round < kRounds && slots.max_load() > bound * (1 + kRounding); ++round) {
    if (!pairing.round()) return;
  }
}

void fill_idle(Slots& slots) {
  std::vector<int32_t> idle, by_load(slots.count());
  for (int32_t slot = 0; slot < slots.count(); ++slot) {
    if (slots.first(slot) == kNone) idle.push_back(slot);
  }
  std::iota(by_load.begin(), by_load.end(), 0);
  std::stable_sort(by_load.begin(), by_load.end(),
                   [&](int32_t a, int32_t b) { return slots.load(a) > slots.load(b); });
  const std::vector<double>& costs = slots.problem().costs;
  for (int32_t donor : by_load) {
    while (!idle.empty() && slots.first(donor) != kNone &&
           slots.next(slots.first(donor)) != kNone) {
      int32_t cheapest = slots.first(donor);
      for (int32_t i = cheapest; i != kNone; i = slots.next(i)) {
        if (costs[i] < costs[cheapest]) cheapest = i;
      }
      if (!slots.allowed(cheapest, kNone, idle.back())) break;
      slots.move(cheapest, idle.back());
      idle.pop_back();
    }
  }
}

void spread(Slots& slots, const std::vector<int32_t>& order) { Spreader(slots, order).run(); }

}  // namespace dmuon::assign

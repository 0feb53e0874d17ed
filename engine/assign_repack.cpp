#include <algorithm>
#include <numeric>

#include "engine/assign_state.h"

namespace dmuon::assign {
namespace {

constexpr int32_t kMaxItems = 2048;
constexpr size_t kMaxClasses = 64;
constexpr int kNodes = 4000;         // slots filled in one search
constexpr size_t kFillings = 64;     // ways to fill one slot that are tried
constexpr int kFillingNodes = 2000;  // steps to find them
constexpr int kHalvings = 12;        // of the gap between the bound and the best known load
constexpr int kLastSteps = 4;        // further tries just below the best known load

// Matrices that are interchangeable here.
struct Class {
  double cost = 0;
  int64_t bytes = 0;
  std::vector<int32_t> items;
};

using Filling = std::vector<int32_t>;  // matrices of each class on one slot

struct Limits {
  double cost = 0;
  int64_t bytes = 0;
  int64_t slots = 0;
};

// Fills one slot after the other, each with the costliest matrix left and a largest set of others,
// fullest first, and goes back where the rest cannot fit any more.
class Completion {
 public:
  Completion(const std::vector<Class>& classes, const Limits& limits)
      : classes_(classes), limits_(limits) {
    for (const Class& c : classes) {
      left_.push_back(static_cast<int32_t>(c.items.size()));
      total_ += c.cost * static_cast<double>(c.items.size());
    }
  }

  bool run() { return fill(0, total_ * (1 - 1e-12)); }
  const std::vector<Filling>& fillings() const { return chosen_; }

 private:
  struct Candidate {
    double cost = 0;
    Filling filling;
    bool operator<(const Candidate& other) const {  // fullest first
      return cost != other.cost ? cost > other.cost : filling > other.filling;
    }
  };

  bool fill(int64_t slot, double rest) {
    const size_t first = first_left();
    if (first == classes_.size()) return true;
    if (rest > static_cast<double>(limits_.slots - slot) * limits_.cost) return false;
    for (const Candidate& candidate : candidates(first)) {
      if (--nodes_ < 0) return false;
      if (repeats(candidate, first)) continue;
      push(candidate);
      if (fill(slot + 1, rest - candidate.cost)) return true;
      pop();
    }
    return false;
  }

  size_t first_left() const {
    return static_cast<size_t>(
        std::find_if(left_.begin(), left_.end(), [](int32_t count) { return count > 0; }) -
        left_.begin());
  }

  // Two slots that begin with the same class may change places: only one order is tried.
  bool repeats(const Candidate& candidate, size_t first) const {
    if (chosen_.empty() || chosen_.back()[first] == 0) return false;
    for (size_t k = 0; k < first; ++k) {
      if (chosen_.back()[k] > 0) return false;
    }
    return candidate < Candidate{costs_.back(), chosen_.back()};
  }

  void push(const Candidate& candidate) {
    for (size_t k = 0; k < left_.size(); ++k) left_[k] -= candidate.filling[k];
    chosen_.push_back(candidate.filling);
    costs_.push_back(candidate.cost);
  }

  void pop() {
    for (size_t k = 0; k < left_.size(); ++k) left_[k] += chosen_.back()[k];
    chosen_.pop_back();
    costs_.pop_back();
  }

  std::vector<Candidate> candidates(size_t first) {
    std::vector<Candidate> found;
    Candidate start{classes_[first].cost, Filling(classes_.size())};
    start.filling[first] = 1;
    steps_ = kFillingNodes;
    if (start.cost <= limits_.cost && classes_[first].bytes <= limits_.bytes) {
      extend(start, first, classes_[first].bytes, found);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  void extend(const Candidate& base, size_t k, int64_t bytes, std::vector<Candidate>& found) {
    if (--steps_ < 0 || found.size() >= kFillings) return;
    if (k == classes_.size()) {
      if (complete(base, bytes)) found.push_back(base);
      return;
    }
    Candidate next = base;
    std::vector<double> sums{base.cost};
    while (next.filling[k] < left_[k] && sums.back() + classes_[k].cost <= limits_.cost &&
           bytes + classes_[k].bytes <= limits_.bytes) {
      ++next.filling[k];
      bytes += classes_[k].bytes;
      sums.push_back(sums.back() + classes_[k].cost);
    }
    for (; !sums.empty(); sums.pop_back()) {
      next.cost = sums.back();
      extend(next, k + 1, bytes, found);
      --next.filling[k];
      bytes -= classes_[k].bytes;
    }
  }

  bool complete(const Candidate& candidate, int64_t bytes) const {
    for (size_t k = 0; k < classes_.size(); ++k) {
      if (candidate.filling[k] < left_[k] && candidate.cost + classes_[k].cost <= limits_.cost &&
          bytes + classes_[k].bytes <= limits_.bytes) {
        return false;
      }
    }
    return true;
  }

  const std::vector<Class>& classes_;
  Limits limits_;
  std::vector<int32_t> left_;
  std::vector<Filling> chosen_;
  std::vector<double> costs_;  // of chosen_
  double total_ = 0;
  int nodes_ = kNodes;
  int steps_ = 0;
};

// Empty where there are too many classes.
std::vector<Class> classify(const std::vector<double>& costs, const std::vector<int64_t>& bytes) {
  std::vector<int32_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return costs[a] != costs[b] ? costs[a] > costs[b] : bytes[a] > bytes[b];
  });
  std::vector<Class> classes;
  for (int32_t i : order) {
    if (classes.empty() || classes.back().cost != costs[i] || classes.back().bytes != bytes[i]) {
      if (classes.size() == kMaxClasses) return {};
      classes.push_back({costs[i], bytes[i], {}});
    }
    classes.back().items.push_back(i);
  }
  return classes;
}

std::vector<int32_t> owners_of(const std::vector<Class>& classes,
                               const std::vector<Filling>& fillings, int32_t size) {
  std::vector<int32_t> owners(size);
  std::vector<size_t> next(classes.size());
  for (size_t slot = 0; slot < fillings.size(); ++slot) {
    for (size_t k = 0; k < classes.size(); ++k) {
      for (int32_t n = 0; n < fillings[slot][k]; ++n) {
        owners[classes[k].items[next[k]++]] = static_cast<int32_t>(slot);
      }
    }
  }
  return owners;
}

// Keeps the best owners found so far, and the load they have.
class Tightener {
 public:
  Tightener(const Slots& slots, double bound)
      : problem_(slots.problem()), low_(bound), high_(slots.max_load()) {
    // Zero bytes without a limit, so that bytes make no classes of their own.
    std::vector<int64_t> bytes(problem_.size());
    if (problem_.memory_limit > 0) bytes = problem_.bytes;
    classes_ = classify(problem_.costs, bytes);
  }

  std::vector<int32_t> run() {
    if (classes_.empty()) return {};
    for (int i = 0; i < kHalvings && open(1e-3); ++i) {
      const double middle = low_ + (high_ - low_) / 2;
      if (!reach(middle)) low_ = middle;
    }
    for (int i = 0; i < kLastSteps && open(1e-9) && reach(high_ * (1 - 1e-9)); ++i) {
    }
    return best_;
  }

 private:
  bool open(double tolerance) const { return high_ - low_ > tolerance * high_; }

  bool reach(double load) {
    const int64_t bytes = problem_.memory_limit > 0 ? problem_.memory_limit : 0;
    Completion search(classes_, {load, bytes, problem_.slots});
    if (!search.run()) return false;
    best_ = owners_of(classes_, search.fillings(), problem_.size());
    high_ = largest_load(problem_, best_);
    return true;
  }

  const AssignProblem& problem_;
  double low_, high_;
  std::vector<Class> classes_;
  std::vector<int32_t> best_;
};

std::vector<int32_t> pack(const std::vector<int64_t>& bytes, int64_t slots, int64_t limit) {
  const std::vector<double> costs(bytes.begin(), bytes.end());
  const std::vector<Class> classes = classify(costs, std::vector<int64_t>(bytes.size()));
  if (classes.empty()) return {};
  Completion search(classes, {static_cast<double>(limit), 0, slots});
  if (!search.run()) return {};
  return owners_of(classes, search.fillings(), static_cast<int32_t>(bytes.size()));
}

// Gives the matrices of one cell their slots. False where they do not fit.
bool pack_cell(const AssignProblem& problem, int32_t cell, std::vector<int32_t>& owners) {
  std::vector<int32_t> items;
  std::vector<int64_t> bytes;
  int64_t limit = problem.memory_limit;
  for (int32_t i = 0; i < problem.size(); ++i) {
    if (problem.cell(owners[i]) != cell) continue;
    items.push_back(i);
    bytes.push_back(problem.bytes[i]);
    limit -= problem.cell_bytes[i];
  }
  if (items.empty()) return true;
  const int64_t cells = problem.cell_count();
  const std::vector<int32_t> found = pack(bytes, problem.slots / cells, limit);
  for (size_t k = 0; k < found.size(); ++k) {
    owners[items[k]] = static_cast<int32_t>(found[k] * cells + cell);
  }
  return !found.empty();
}

std::vector<int32_t> pack_cells(const AssignProblem& problem) {
  const int64_t cells = problem.cell_count(), in_cell = problem.slots / cells;
  std::vector<int64_t> bytes(problem.bytes);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] += in_cell * problem.cell_bytes[i];
  std::vector<int32_t> owners = pack(bytes, cells, in_cell * problem.memory_limit);
  for (int32_t cell = 0; cell < cells && !owners.empty(); ++cell) {
    if (!pack_cell(problem, cell, owners)) owners.clear();
  }
  return owners;
}

}  // namespace

std::vector<int32_t> repack(const Slots& slots, double bound) {
  if (slots.problem().size() > kMaxItems || slots.problem().max_owners > 0) return {};
  return Tightener(slots, bound).run();
}

std::vector<int32_t> pack_bytes(const AssignProblem& problem) {
  if (problem.size() > kMaxItems) return {};
  if (problem.cell_bytes.empty()) return pack(problem.bytes, problem.slots, problem.memory_limit);
  return pack_cells(problem);
}

}  // namespace dmuon::assign

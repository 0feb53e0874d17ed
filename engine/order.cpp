#include "engine/order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

namespace dmuon {
namespace {

constexpr size_t kSmall = 96;  // below this, a comparison sort is faster than counting
constexpr int kDigits = 8;

using Places = std::array<uint32_t, 256>;  // of each value of one digit

size_t digit(uint64_t key, int place) { return (key >> (8 * place)) & 255; }

// All digits at once: eight counters in different places do not wait for each other.
std::array<Places, kDigits> count_digits(std::span<const Keyed> items) {
  std::array<Places, kDigits> counts{};
  for (const Keyed& item : items) {
    for (int place = 0; place < kDigits; ++place) ++counts[place][digit(item.key, place)];
  }
  return counts;
}

void sort_by_digit(std::span<const Keyed> from, std::span<Keyed> to, int place, Places& places) {
  std::exclusive_scan(places.begin(), places.end(), places.begin(), 0u);
  for (const Keyed& item : from) to[places[digit(item.key, place)]++] = item;
}

// Eight bytes of `name` from `depth` on, the first the most significant, missing ones 0.
uint64_t bytes_at(std::string_view name, size_t depth) {
  if (depth >= name.size()) return 0;
  uint64_t word = 0;
  if (name.size() < 8) {
    std::memcpy(&word, name.data() + depth, name.size() - depth);
    return __builtin_bswap64(word);
  }
  const size_t start = std::min(depth, name.size() - 8);
  std::memcpy(&word, name.data() + start, 8);
  return __builtin_bswap64(word) << (8 * (depth - start));
}

// Of the first `limit` bytes.
size_t common_prefix(std::string_view a, std::string_view b, size_t limit) {
  limit = std::min(limit, b.size());
  if (std::memcmp(a.data(), b.data(), limit) == 0) return limit;
  const auto end = a.begin() + static_cast<std::ptrdiff_t>(limit);
  return static_cast<size_t>(std::mismatch(a.begin(), end, b.begin()).first - a.begin());
}

class NameSorter {
 public:
  explicit NameSorter(const std::vector<std::string_view>& names) : names_(names) {}

  void sort(std::span<Keyed> items) {
    if (items.size() < 2) return;
    const size_t depth = shared_prefix(items);
    for (Keyed& item : items) item.key = bytes_at(name(item), depth);
    sort_by_key(items, scratch_);
    for (size_t begin = 0, end = 0; begin < items.size(); begin = end) {
      end = begin + 1;
      while (end < items.size() && items[end].key == items[begin].key) ++end;
      sort_rest(items.subspan(begin, end - begin), depth + 8);
    }
  }

 private:
  std::string_view name(const Keyed& item) const { return names_[item.index]; }

  // Names that end within these eight bytes may hold zeros: the comparison settles it.
  void sort_rest(std::span<Keyed> items, size_t depth) {
    if (items.size() < 2) return;
    const bool all_longer = std::all_of(
        items.begin(), items.end(), [&](const Keyed& item) { return name(item).size() > depth; });
    if (all_longer) return sort(items);
    std::sort(items.begin(), items.end(), [&](const Keyed& a, const Keyed& b) {
      return name(a) != name(b) ? name(a) < name(b) : a.index < b.index;
    });
  }

  size_t shared_prefix(std::span<const Keyed> items) const {
    const std::string_view first = name(items.front());
    size_t shared = first.size();
    for (const Keyed& item : items) shared = common_prefix(first, name(item), shared);
    return shared;
  }

  const std::vector<std::string_view>& names_;
  std::vector<Keyed> scratch_;
};

std::vector<int32_t> indices(const std::vector<Keyed>& items) {
  std::vector<int32_t> order(items.size());
  std::transform(items.begin(), items.end(), order.begin(),
                 [](const Keyed& item) { return item.index; });
  return order;
}

// Where neighbours mostly have equal keys, as in lists in model order, only the runs are sorted.
bool sort_runs(std::span<Keyed> items, std::vector<Keyed>& scratch) {
  std::vector<Keyed> runs;  // index: of the first item
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0 && items[i].key == items[i - 1].key) continue;
    if (runs.size() == items.size() / 4) return false;
    runs.push_back({items[i].key, static_cast<int32_t>(i)});
  }
  std::sort(runs.begin(), runs.end());
  auto to = scratch.begin();
  for (const Keyed& run : runs) {
    for (size_t i = run.index; i < items.size() && items[i].key == run.key; ++i) *to++ = items[i];
  }
  std::copy(scratch.begin(), to, items.begin());
  return true;
}

}  // namespace

void sort_by_key(std::span<Keyed> items, std::vector<Keyed>& scratch) {
  if (items.size() < kSmall) {
    std::sort(items.begin(), items.end());
    return;
  }
  if (scratch.size() < items.size()) scratch.resize(items.size());
  if (sort_runs(items, scratch)) return;
  std::span<Keyed> from = items, to(scratch.data(), items.size());
  std::array<Places, kDigits> counts = count_digits(items);
  for (int place = 0; place < kDigits; ++place) {
    if (counts[place][digit(items.front().key, place)] == items.size()) continue;
    sort_by_digit(from, to, place, counts[place]);
    std::swap(from, to);
  }
  if (from.data() != items.data()) std::copy(from.begin(), from.end(), items.begin());
}

std::vector<int32_t> order_by_name(const std::vector<std::string_view>& names) {
  std::vector<Keyed> items(names.size());
  for (size_t i = 0; i < names.size(); ++i) items[i].index = static_cast<int32_t>(i);
  if (!std::is_sorted(names.begin(), names.end())) NameSorter(names).sort(items);
  return indices(items);
}

std::vector<int32_t> order_descending(const std::vector<double>& values) {
  std::vector<Keyed> items(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    items[i] = {~std::bit_cast<uint64_t>(values[i]), static_cast<int32_t>(i)};
  }
  std::vector<Keyed> scratch;
  sort_by_key(items, scratch);
  return indices(items);
}

}  // namespace dmuon

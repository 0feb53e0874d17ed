#include "engine/order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace dmuon {
namespace {

constexpr int kDigitBits = 11;
constexpr size_t kBuckets = size_t{1} << kDigitBits;
constexpr size_t kSmall = 512;  // below this, a comparison sort is faster than counting

size_t digit(uint64_t key, int shift) { return (key >> shift) & (kBuckets - 1); }

void sort_by_digit(std::span<Keyed> from, std::span<Keyed> to, int shift) {
  std::array<uint32_t, kBuckets> place{};
  for (const Keyed& item : from) ++place[digit(item.key, shift)];
  uint32_t sum = 0;
  for (uint32_t& count : place) count = std::exchange(sum, sum + count);
  for (const Keyed& item : from) to[place[digit(item.key, shift)]++] = item;
}

uint64_t differing_bits(std::span<const Keyed> items) {
  uint64_t all = ~uint64_t{0}, any = 0;
  for (const Keyed& item : items) all &= item.key, any |= item.key;
  return all ^ any;
}

// Eight bytes of `name` from `depth` on, the first the most significant, missing ones 0.
uint64_t bytes_at(std::string_view name, size_t depth) {
  if (depth >= name.size()) return 0;
  uint64_t word = 0;
  std::memcpy(&word, name.data() + depth, std::min<size_t>(8, name.size() - depth));
  return __builtin_bswap64(word);
}

size_t common_prefix(std::string_view a, std::string_view b, size_t from, size_t limit) {
  limit = std::min({limit, a.size(), b.size()});
  const auto end = a.begin() + static_cast<std::ptrdiff_t>(limit);
  const auto start = static_cast<std::ptrdiff_t>(std::min(from, limit));
  return static_cast<size_t>(std::mismatch(a.begin() + start, end, b.begin() + start).first -
                             a.begin());
}

class NameSorter {
 public:
  explicit NameSorter(const std::vector<std::string_view>& names) : names_(names) {}

  // The names of `items` agree in their first `depth` bytes.
  void sort(std::span<Keyed> items, size_t depth) {
    if (items.size() < 2) return;
    depth = shared_prefix(items, depth);
    for (Keyed& item : items) item.key = bytes_at(name(item), depth);
    sort_by_key(items);
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
    if (all_longer) return sort(items, depth);
    std::stable_sort(items.begin(), items.end(),
                     [&](const Keyed& a, const Keyed& b) { return name(a) < name(b); });
  }

  size_t shared_prefix(std::span<const Keyed> items, size_t depth) const {
    const std::string_view first = name(items.front());
    size_t shared = first.size();
    for (const Keyed& item : items) shared = common_prefix(first, name(item), depth, shared);
    return shared;
  }

  const std::vector<std::string_view>& names_;
};

std::vector<int32_t> indices(const std::vector<Keyed>& items) {
  std::vector<int32_t> order(items.size());
  std::transform(items.begin(), items.end(), order.begin(),
                 [](const Keyed& item) { return item.index; });
  return order;
}

}  // namespace

void sort_by_key(std::span<Keyed> items) {
  if (items.size() < kSmall) {
    std::stable_sort(items.begin(), items.end(),
                     [](const Keyed& a, const Keyed& b) { return a.key < b.key; });
    return;
  }
  std::vector<Keyed> scratch(items.size());
  std::span<Keyed> from = items, to = scratch;
  const uint64_t differing = differing_bits(items);
  for (int shift = 0; shift < 64; shift += kDigitBits) {
    if (digit(differing, shift) == 0) continue;
    sort_by_digit(from, to, shift);
    std::swap(from, to);
  }
  if (from.data() != items.data()) std::copy(from.begin(), from.end(), items.begin());
}

std::vector<int32_t> order_by_name(const std::vector<std::string_view>& names) {
  std::vector<Keyed> items(names.size());
  for (size_t i = 0; i < names.size(); ++i) items[i].index = static_cast<int32_t>(i);
  if (!std::is_sorted(names.begin(), names.end())) NameSorter(names).sort(items, 0);
  return indices(items);
}

std::vector<int32_t> order_descending(const std::vector<double>& values) {
  std::vector<Keyed> items(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    items[i] = {~std::bit_cast<uint64_t>(values[i]), static_cast<int32_t>(i)};
  }
  sort_by_key(items);
  return indices(items);
}

}  // namespace dmuon

#include "engine/order.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

namespace dmuon {
namespace {

using ::testing::ElementsAre;

std::vector<int32_t> expected_order(const std::vector<std::string_view>& names) {
  std::vector<int32_t> order(names.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return names[a] < names[b]; });
  return order;
}

void expect_sorted(const std::vector<std::string>& texts) {
  const std::vector<std::string_view> names(texts.begin(), texts.end());
  EXPECT_EQ(order_by_name(names), expected_order(names));
}

std::vector<std::string> model_names(int layers, int experts) {
  std::vector<std::string> names;
  for (int i = 0; i < layers; ++i) {
    for (int e = 0; e < experts; ++e) {
      for (const char* leaf : {"gate", "up", "down"}) {
        names.push_back("model.layers." + std::to_string(i) + ".experts." + std::to_string(e) +
                        "." + leaf + "_proj.weight");
      }
    }
  }
  return names;
}

TEST(OrderByName, IsLexicographicAndStable) {
  EXPECT_THAT(order_by_name({"b", "a", "", "a", "ab"}), ElementsAre(2, 1, 3, 4, 0));
}

TEST(OrderByName, ComparesBytesAsUnsigned) { expect_sorted({"\xc3\xa9", "z", "e", "\x01"}); }

TEST(OrderByName, TellsEmbeddedZerosFromTheEnd) {
  expect_sorted({std::string("a\0b", 3), std::string("a\0", 2), "a", std::string("a\0\0", 3), "aa",
                 std::string("abcdefgh\0", 9), "abcdefgh", std::string("abcdefgh\0\0x", 11)});
}

TEST(OrderByName, SortsModelOrder) { expect_sorted(model_names(30, 200)); }

TEST(OrderByName, SortsShuffledNamesWithDuplicates) {
  std::vector<std::string> names = model_names(12, 130);
  names.insert(names.end(), names.begin(), names.begin() + 900);
  std::shuffle(names.begin(), names.end(), std::mt19937(3));
  expect_sorted(names);
}

TEST(OrderByName, SortsRandomTextsOfAllLengths) {
  std::mt19937 random(5);
  std::vector<std::string> names(20'000);
  for (std::string& name : names) {
    name.resize(random() % 20);
    for (char& c : name) c = static_cast<char>('a' + random() % 3);
  }
  expect_sorted(names);
}

TEST(OrderDescending, KeepsEqualValuesInOrder) {
  EXPECT_THAT(order_descending({1, 3, 0, 3, 2}), ElementsAre(1, 3, 4, 0, 2));
}

TEST(OrderDescending, SortsManyValuesOfAllSizes) {
  std::mt19937_64 random(11);
  std::vector<double> values(30'000);
  for (double& value : values)
    value = std::ldexp(static_cast<double>(random() % 1000), random() % 90);
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return values[a] > values[b]; });
  EXPECT_EQ(order_descending(values), order);
}

}  // namespace
}  // namespace dmuon

#include "kernels/cpu/threads.h"

#include <gmock/gmock.h>

#include <atomic>
#include <new>
#include <stdexcept>

namespace dmuon::cpu {
namespace {

constexpr int64_t kTasks = 200;

int64_t sum_of_indices(int threads) {
  std::atomic<int64_t> sum = 0;
  for_each(threads, kTasks, [&](int64_t index, int) { sum += index; });
  return sum;
}

TEST(ForEach, RunsEachTaskOnce) {
  for (const int threads : {1, 2, 4}) EXPECT_EQ(sum_of_indices(threads), kTasks * (kTasks - 1) / 2);
}

TEST(ForEach, RethrowsWhatATaskThrowsOnWhicheverThreadAndServesTheNextJob) {
  for (const int threads : {1, 2, 4}) {
    for (const int64_t bad : {int64_t{0}, int64_t{7}, kTasks - 1}) {
      const auto fail_at = [bad](int64_t index, int) {
        if (index == bad) throw std::bad_alloc();
      };
      EXPECT_THROW(for_each(threads, kTasks, fail_at), std::bad_alloc);
      EXPECT_EQ(sum_of_indices(threads), kTasks * (kTasks - 1) / 2);
    }
  }
}

TEST(ForEach, ThrowsOnceWhereEveryTaskFails) {
  const auto fail = [](int64_t, int) { throw std::runtime_error("each"); };
  EXPECT_THROW(for_each(4, kTasks, fail), std::runtime_error);
  EXPECT_EQ(sum_of_indices(4), kTasks * (kTasks - 1) / 2);
}

TEST(ForEach, OfATaskThatFailedLeavesItsThreadAbleToShareAgain) {
  const auto nested = [](int64_t, int) {
    for_each(2, 8, [](int64_t, int) { throw std::runtime_error("inner"); });
  };
  EXPECT_THROW(for_each(2, 8, nested), std::runtime_error);
  EXPECT_GT(usable_threads(), 0);
  EXPECT_EQ(sum_of_indices(2), kTasks * (kTasks - 1) / 2);
}

}  // namespace
}  // namespace dmuon::cpu

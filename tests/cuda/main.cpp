// The tests, then the timings. Without a GPU: the tests that need none, and exit code 77.
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/cuda/timings.h"

namespace {

constexpr int kSkipped = 77;

int tests_without_a_device() {
  testing::GTEST_FLAG(filter) = "WithoutADevice.*";
  const int failed = RUN_ALL_TESTS();
  if (failed != 0) return failed;
  std::puts("SKIPPED: no CUDA device here. Nothing above has run on a GPU.");
  return kSkipped;
}

bool too_old() {
  int major = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  return major < 8;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (c10::cuda::device_count() == 0) return tests_without_a_device();
  if (too_old()) {
    std::puts("SKIPPED: this GPU is older than compute capability 8.0; dmuon uses ATen there.");
    return kSkipped;
  }
  const int failed = RUN_ALL_TESTS();
  dmuon::print_timings();
  return failed;
}

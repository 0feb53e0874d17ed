#include "kernels/cpu/workspace.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace dmuon::cpu {
namespace {

// Large blocks lie in huge pages where the system gives them: panels are walked across many pages.
constexpr size_t kHugePage = size_t{2} << 20;

float* allocate(int64_t floats) {
  const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const size_t whole = (bytes + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, whole);
  if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) ::madvise(data, whole, MADV_HUGEPAGE);
#endif
  return static_cast<float*>(data);
}

}  // namespace

void Arena::Free::operator()(float* data) const noexcept { std::free(data); }

void Arena::reserve(int64_t floats) {
  taken_ = 0;
  if (floats <= size_) return;
  data_.reset();
  size_ = 0;
  data_.reset(allocate(rounded(floats)));
  size_ = rounded(floats);
}

float* Arena::take(int64_t floats) {
  float* data = data_.get() + taken_;
  taken_ += rounded(floats);
  TORCH_INTERNAL_ASSERT(taken_ <= size_, "Newton-Schulz asked for ", taken_, " floats of ", size_);
  return data;
}

}  // namespace dmuon::cpu

namespace dmuon {

int64_t NsWorkspace::bytes() const {
  int64_t bytes = 0;
  for (const cpu::Arena& arena : arenas_) bytes += arena.bytes();
  return bytes;
}

std::vector<cpu::Arena>& NsWorkspace::arenas(int threads) {
  if (arenas_.size() < static_cast<size_t>(threads)) arenas_.resize(threads);
  return arenas_;
}

}  // namespace dmuon

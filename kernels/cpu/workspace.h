// Memory that Newton-Schulz keeps from one call to the next.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace dmuon::cpu {

// One block of floats that only grows, handed out from its start.
class Arena {
 public:
  // Room for `floats` at least, none of it taken. Frees what was there where it grows.
  void reserve(int64_t floats);
  // 64-byte aligned, uninitialised, valid until the next reserve.
  float* take(int64_t floats);
  // Gives back what was taken since `taken()` was `mark`.
  int64_t taken() const { return taken_; }
  void give_back_to(int64_t mark) { taken_ = mark; }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(float)); }

  // What take(floats) takes.
  static int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

 private:
  struct Free {
    void operator()(float* data) const noexcept;
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
  int64_t taken_ = 0;
};

}  // namespace dmuon::cpu

namespace dmuon {

// Nothing is allocated while shapes and threads stay what they were. Not for two calls at once: one
// per lane of work.
class NsWorkspace {
 public:
  int64_t bytes() const;

  // For the kernels: one per thread.
  std::vector<cpu::Arena>& arenas(int threads);

 private:
  std::vector<cpu::Arena> arenas_;
};

}  // namespace dmuon

#pragma once
#include <chrono>
#include <cstdint>

namespace dmuon {

inline int64_t microseconds_since(std::chrono::steady_clock::time_point start) {
  const auto elapsed = std::chrono::steady_clock::now() - start;
  return std::chrono::duration_cast<std::chrono::microseconds>(elapsed).count();
}

}  // namespace dmuon

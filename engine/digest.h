// A 128-bit digest of a byte stream: equal input, equal digest, on every rank and machine.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace dmuon {

struct Digest {
  std::array<uint64_t, 2> words{};
  bool operator==(const Digest&) const = default;
  std::string hex() const;
};

// Not cryptographic: it finds accidents, not attacks. Integers are mixed little-endian and strings
// with their length, so that ("ab", "c") and ("a", "bc") differ.
class Hasher {
 public:
  Hasher& add(int64_t value) {
    mix(static_cast<uint64_t>(value));
    return *this;
  }
  Hasher& add(double value) { return add(std::bit_cast<int64_t>(value)); }
  Hasher& add(std::string_view text);
  Digest digest() const;

 private:
  // Odd, with about half of the bits set: a product with them is a bijection that carries upwards.
  static constexpr uint64_t kA = 0xd6e8feb86659fd93;
  static constexpr uint64_t kB = 0xa0761d6478bd642f;

  static uint64_t avalanche(uint64_t word);
  void mix(uint64_t word) {
    a_ = std::rotl((a_ ^ word) * kA, 29);
    b_ = std::rotl((b_ + word) * kB, 37);
    ++count_;
  }

  uint64_t a_ = 0x9e3779b97f4a7c15;
  uint64_t b_ = 0xc2b2ae3d27d4eb4f;
  uint64_t count_ = 0;
};

}  // namespace dmuon

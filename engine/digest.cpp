#include "engine/digest.h"

#include <bit>
#include <cstring>

namespace dmuon {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

// Odd, with about half of the bits set: multiplying by them is a bijection that carries upwards.
constexpr uint64_t kA = 0xd6e8feb86659fd93;
constexpr uint64_t kB = 0xa0761d6478bd642f;

uint64_t load(const char* bytes, size_t count) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, count);
  return word;
}

uint64_t avalanche(uint64_t word) {
  for (uint64_t factor : {kA, kB}) word = (word ^ (word >> 32)) * factor;
  return word ^ (word >> 29);
}

}  // namespace

std::string Digest::hex() const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint64_t word : words) {
    for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(word >> shift) & 15];
  }
  return text;
}

void Hasher::mix(uint64_t word) {
  a_ = std::rotl((a_ ^ word) * kA, 29);
  b_ = std::rotl((b_ + word) * kB, 37);
  ++count_;
}

Hasher& Hasher::add(int64_t value) {
  mix(static_cast<uint64_t>(value));
  return *this;
}

Hasher& Hasher::add(double value) {
  mix(std::bit_cast<uint64_t>(value));
  return *this;
}

Hasher& Hasher::add(std::string_view text) {
  mix(text.size());
  const char* bytes = text.data();
  size_t left = text.size();
  for (; left >= 8; left -= 8, bytes += 8) mix(load(bytes, 8));
  if (left > 0) mix(load(bytes, left));
  return *this;
}

Digest Hasher::digest() const {
  const uint64_t a = avalanche(a_ + count_);
  const uint64_t b = avalanche(b_ ^ std::rotl(a, 32));
  return {{a + b, b}};
}

}  // namespace dmuon

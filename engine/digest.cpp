#include "engine/digest.h"

#include <bit>
#include <cstring>

namespace dmuon {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

template <class Word>
uint64_t load(const char* bytes) {
  Word word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Up to 8 bytes as one word; different texts of one length give different words.
uint64_t load_tail(const char* bytes, size_t count) {
  if (count >= 4) return load<uint32_t>(bytes) | load<uint32_t>(bytes + count - 4) << 32;
  if (count == 0) return 0;
  return load<uint8_t>(bytes) | load<uint8_t>(bytes + count / 2) << 8 |
         load<uint8_t>(bytes + count - 1) << 16;
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

uint64_t Hasher::avalanche(uint64_t word) {
  for (uint64_t factor : {kA, kB}) word = (word ^ (word >> 32)) * factor;
  return word ^ (word >> 29);
}

Hasher& Hasher::add(std::string_view text) {
  mix(text.size());
  const char* bytes = text.data();
  size_t left = text.size();
  for (; left >= 8; left -= 8, bytes += 8) mix(load<uint64_t>(bytes));
  if (left > 0) mix(load_tail(bytes, left));
  return *this;
}

Digest Hasher::digest() const {
  const uint64_t a = avalanche(a_ + count_);
  const uint64_t b = avalanche(b_ ^ std::rotl(a, 32));
  return {{a + b, b}};
}

}  // namespace dmuon

#include "engine/digest.h"

#include <gmock/gmock.h>

#include <set>

namespace dmuon {
namespace {

Digest of(std::string_view text) { return Hasher().add(text).digest(); }

TEST(Digest, IsTheSameForTheSameInput) {
  EXPECT_EQ(Hasher().add("a").add(int64_t{3}).add(0.5).digest(),
            Hasher().add("a").add(int64_t{3}).add(0.5).digest());
}

// Every rank, machine and build must agree: a changed value here breaks mixed jobs.
TEST(Digest, HasAFixedValue) {
  EXPECT_EQ(Hasher().add("dmuon").add(int64_t{-1}).add(1.5).digest().hex(),
            "33ae8f1a59ff6fcc31f37ab79daee10c");
}

TEST(Digest, WritesThirtyTwoDigits) {
  EXPECT_EQ((Digest{{0x0123456789abcdef, 1}}.hex()), "0123456789abcdef0000000000000001");
}

TEST(Digest, KnowsWhereAStringEnds) {
  EXPECT_NE(Hasher().add("ab").add("c").digest(), Hasher().add("a").add("bc").digest());
  EXPECT_NE(of(std::string_view("a\0", 2)), of("a"));
  EXPECT_NE(Hasher().digest(), of(""));
}

TEST(Digest, KnowsTheOrder) {
  EXPECT_NE(Hasher().add(int64_t{1}).add(int64_t{2}).digest(),
            Hasher().add(int64_t{2}).add(int64_t{1}).digest());
}

TEST(Digest, SeesEveryByteOfAString) {
  for (size_t size = 1; size <= 40; ++size) {
    const std::string text(size, 'x');
    for (size_t i = 0; i < size; ++i) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string other = text;
        other[i] = static_cast<char>(other[i] ^ (1 << bit));
        EXPECT_NE(of(other), of(text)) << "byte " << i << " of " << size;
      }
    }
  }
}

TEST(Digest, HasNoCollisionInEitherHalfAmongManySimilarNames) {
  std::set<uint64_t> first, second;
  for (int layer = 0; layer < 300; ++layer) {
    for (int expert = 0; expert < 300; ++expert) {
      const Digest digest =
          of("layers." + std::to_string(layer) + ".experts." + std::to_string(expert) + ".weight");
      first.insert(digest.words[0]);
      second.insert(digest.words[1]);
    }
  }
  EXPECT_EQ(first.size(), 90'000u);
  EXPECT_EQ(second.size(), 90'000u);
}

}  // namespace
}  // namespace dmuon

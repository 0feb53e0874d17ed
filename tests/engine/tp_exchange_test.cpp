#include "engine/tp_exchange.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include "tests/support/tiny_unit.h"

namespace dmuon {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using namespace testing;

constexpr int kTps = 3;

// Uneven; in blocks; empty on the last rank, and led by it; along the middle dim; not cut.
TinyUnit a_unit() {
  return TinyUnit({.tp = kTps}, {{"blocks", {4, 9}, cut_in_blocks({4, 9}, 1, {6, 3}, kTps), 1},
                                 {"empty", {5, 4}, cut_in_pieces({5, 4}, 0, {3, 2, 0}), 2},
                                 {"middle", {2, 6, 3}, cut_evenly({2, 6, 3}, 1, kTps), 0},
                                 {"uneven", {7, 3}, cut_evenly({7, 3}, 0, kTps), 0},
                                 {"whole", {3, 3}, {}, 1}});
}

at::Tensor whole_of(const TinyUnit& unit, int matrix) {
  const TpLayout& layout = unit.layout(unit.plan().matrices[matrix].name);
  return some_integers(layout.cut() ? layout.sizes : std::vector<int64_t>{3, 3}, matrix);
}

using Body = std::function<void(UnitStore&, Transport&)>;

void on_ranks(const TinyUnit& unit, const Body& body) {
  SimWorld world(kTps);
  run_ranks(kTps, [&](int rank) {
    UnitStore store = unit.store({.tp = rank});
    const auto transport = world.transport(rank);
    body(store, *transport);
  });
}

std::vector<at::Tensor> shards(const TinyUnit& unit, const UnitStore& store, int tp) {
  std::vector<at::Tensor> pieces;
  for (const int s : gathering_slots(store)) {
    const Slot& slot = store.slots()[s];
    pieces.push_back(shard_of(whole_of(unit, slot.matrix), slot.layout, tp));
  }
  return pieces;
}

TEST(GatherGradients, PutsAllPiecesTogetherOnTheTpOwner) {
  const TinyUnit unit = a_unit();
  on_ranks(unit, [&](UnitStore& store, Transport& tp) {
    Staging staging;
    const auto slots = gathering_slots(store);
    EXPECT_THAT(slots, SizeIs(4));
    const auto wholes = gather_gradients(store, shards(unit, store, tp.rank()), tp, staging);
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = store.slots()[slots[i]];
      EXPECT_EQ(wholes[i].defined(), slot.tp_owner == tp.rank());
      if (!wholes[i].defined()) continue;
      EXPECT_TRUE(wholes[i].equal(whole_of(unit, slot.matrix)));
    }
  });
}

TEST(GatherGradients, TakesZerosForAMissingPieceAndNothingWhereAllAreMissing) {
  const TinyUnit unit = a_unit();
  const int uneven = unit.index("uneven"), blocks = unit.index("blocks");
  on_ranks(unit, [&](UnitStore& store, Transport& tp) {
    Staging staging;
    const auto slots = gathering_slots(store);
    auto pieces = shards(unit, store, tp.rank());
    for (size_t i = 0; i < slots.size(); ++i) {
      const int matrix = store.slots()[slots[i]].matrix;
      if (matrix == blocks || (matrix == uneven && tp.rank() != 1)) pieces[i] = at::Tensor();
    }
    const auto wholes = gather_gradients(store, pieces, tp, staging);
    for (size_t i = 0; i < slots.size(); ++i) {
      const int matrix = store.slots()[slots[i]].matrix;
      EXPECT_EQ(wholes[i].defined(), matrix != blocks && store.slots()[slots[i]].leads);
      if (matrix != uneven || !wholes[i].defined()) continue;
      at::Tensor expected = at::zeros({7, 3});
      expected.narrow(0, 3, 3).copy_(whole_of(unit, uneven).narrow(0, 3, 3));
      EXPECT_TRUE(wholes[i].equal(expected));
    }
  });
}

TEST(GatherGradients, TakesPiecesOfAnyStridesAndDtype) {
  const TinyUnit unit = a_unit();
  on_ranks(unit, [&](UnitStore& store, Transport& tp) {
    Staging staging;
    auto pieces = shards(unit, store, tp.rank());
    for (auto& piece : pieces) {
      piece = piece.transpose(0, 1).contiguous().transpose(0, 1).to(at::kBFloat16);
    }
    const auto wholes = gather_gradients(store, pieces, tp, staging);
    const auto slots = gathering_slots(store);
    for (size_t i = 0; i < slots.size(); ++i) {
      if (!wholes[i].defined()) continue;
      EXPECT_EQ(wholes[i].scalar_type(), at::kFloat);
      EXPECT_TRUE(wholes[i].equal(whole_of(unit, store.slots()[slots[i]].matrix)));
    }
  });
}

TEST(GatherGradients, LeavesOutWhatIsFrozenAndWhatStaysInShards) {
  const TinyUnit unit = a_unit();
  UnitStore store = unit.store({});
  store.slots()[slot_of(store, unit, "uneven")].parameter.set_requires_grad(false);
  store.keep_in_shards(slot_of(store, unit, "blocks"), true);
  store.keep_in_shards(slot_of(store, unit, "whole"), true);
  EXPECT_THAT(gathering_slots(store),
              ElementsAre(slot_of(store, unit, "empty"), slot_of(store, unit, "middle")));
  EXPECT_THAT(scattering_slots(store),
              ElementsAre(slot_of(store, unit, "empty"), slot_of(store, unit, "middle"),
                          slot_of(store, unit, "whole")));
  EXPECT_THAT(slots_in_shards(store), ElementsAre(slot_of(store, unit, "blocks")));
}

TEST(GatherGradients, OnlyTheOwnersCellTakesPart) {
  const TinyUnit unit({.shard = 2, .tp = 2}, {{"a", {4, 4}, cut_evenly({4, 4}, 0, 2), 0, 1}});
  EXPECT_THAT(gathering_slots(unit.store({.shard = 0})), IsEmpty());
  EXPECT_THAT(gathering_slots(unit.store({.shard = 1})), SizeIs(1));
}

TEST(UpdateScatter, GivesEveryRankItsPieceAndWholeWhatIsNotCut) {
  const TinyUnit unit = a_unit();
  on_ranks(unit, [&](UnitStore& store, Transport& tp) {
    Staging staging;
    const auto slots = scattering_slots(store);
    std::vector<at::Tensor> updates;
    for (const int s : slots) {
      const Slot& slot = store.slots()[s];
      updates.push_back(slot.leads ? whole_of(unit, slot.matrix) : at::Tensor());
    }
    const auto pieces = UpdateScatter(store, updates, tp, staging).finish();
    ASSERT_THAT(pieces, SizeIs(5));
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = store.slots()[slots[i]];
      EXPECT_TRUE(pieces[i].equal(shard_of(whole_of(unit, slot.matrix), slot.layout, tp.rank())));
    }
  });
}

TEST(UpdateScatter, GivesNothingWhereTheTpOwnerHasNothing) {
  const TinyUnit unit = a_unit();
  on_ranks(unit, [&](UnitStore& store, Transport& tp) {
    Staging staging;
    const auto slots = scattering_slots(store);
    std::vector<at::Tensor> updates(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = store.slots()[slots[i]];
      if (slot.leads && slot.tp_owner != 1) updates[i] = whole_of(unit, slot.matrix);
    }
    const auto pieces = UpdateScatter(store, updates, tp, staging).finish();
    for (size_t i = 0; i < slots.size(); ++i) {
      EXPECT_EQ(pieces[i].defined(), store.slots()[slots[i]].tp_owner != 1);
    }
  });
}

TEST(Staging, IsOneBufferOfTheLargestWhereItIsShared) {
  Staging shared(true);
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor large = shared.take(8, options), small = shared.take(3, options);
  EXPECT_EQ(small.numel(), 3);
  EXPECT_TRUE(small.is_alias_of(large));
  Staging separate;
  EXPECT_FALSE(separate.take(3, options).is_alias_of(separate.take(3, options)));
}

TEST(Staging, HoldsWhatOneExchangeSendsAndReceives) {
  const TinyUnit unit = a_unit();
  // Of 'empty', led by rank 2: 3 rows from rank 0 and 2 from rank 1. Each piece has a flag.
  int64_t gathered = 0, scattered = 0;
  for (int tp = 0; tp < kTps; ++tp) {
    gathered += gather_elements(unit.store({.tp = tp}), tp, kTps);
    scattered += scatter_elements(unit.store({.tp = tp}), tp, kTps);
  }
  const int64_t blocks = 36 - 12, empty = 20, middle = 36 - 12, uneven = 21 - 9, flags = 2;
  EXPECT_EQ(gathered, 2 * (blocks + empty + middle + uneven + 4 * flags));
  EXPECT_EQ(scattered, gathered + 2 * (2 * 9 + flags));
}

}  // namespace
}  // namespace dmuon

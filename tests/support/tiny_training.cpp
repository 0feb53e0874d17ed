#include "tests/support/tiny_training.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <mutex>

namespace dmuon::testing {
namespace {

void put_together(Weights& all, TinyJob& job) {
  for (const auto& [name, shard] : job.owned_weights()) {
    const TpLayout layout = job.layout(name);
    if (!layout.cut()) {
      const bool same = all.try_emplace(name, shard).first->second.equal(shard);
      EXPECT_TRUE(same) << name << " differs between TP ranks";
      continue;
    }
    at::Tensor& whole = all[name];
    if (!whole.defined()) whole = at::zeros(layout.sizes, shard.options());
    whole.index_copy_(layout.dim, indices_on(layout, job.grid().position().tp), shard);
  }
}

}  // namespace

Weights trained(SimWorld& world, const TinyOptions& options, const Script& script) {
  Weights all;
  std::mutex mutex;
  run_ranks(world.size(), [&](int rank) {
    TinyJob job(world, rank, options);
    script(job, job.grid().cell(), static_cast<int>(job.grid().mesh().cells()));
    job.engine->wait_publishes();
    std::lock_guard lock(mutex);
    put_together(all, job);
  });
  return all;
}

Weights trained(int ranks, const TinyOptions& options, const Script& script, uint64_t seed) {
  SimWorld world(ranks);
  if (seed) world.reorder(seed);
  return trained(world, options, script);
}

bool same_bits(const Weights& a, const Weights& b) {
  return a.size() == b.size() && std::ranges::all_of(a, [&](const auto& item) {
           return item.second.equal(b.at(item.first));
         });
}

void expect_equal_to_one_process(const Weights& got, const ReferenceScript& script, int64_t inner) {
  const Expected expected = expected_of(kRows, script, inner);
  EXPECT_EQ(got.size(), expected.weights.size());
  EXPECT_LE(relative_error(got, expected.weights), expected.tolerance);
}

void plain_steps(TinyJob& job, int cell, int cells, int steps) {
  for (int step = 0; step < steps; ++step) {
    job.zero_grad();
    loss_of(job.forward(share_of(tiny_batch(step, kRows), cell, cells))).backward();
    EXPECT_TRUE(job.step());
  }
}

ReferenceScript reference_steps(int steps) {
  return [steps](TinyReference& reference, const Batch& x) {
    for (int step = 0; step < steps; ++step) {
      reference.zero_grad();
      loss_of(reference.forward(x(step))).backward();
      reference.step();
    }
  };
}

// Uneven; in blocks; and with nothing on the last rank.
Cuts some_cuts(int tps, int64_t inner) {
  std::vector<int64_t> all_but_last(tps, 0);
  for (int64_t i = 0; i < 4; ++i) ++all_but_last[i % std::max(1, tps - 1)];
  return {{"blocks.0.up", cut_evenly({inner, 4}, 0, tps)},
          {"blocks.0.down", cut_in_blocks({4, inner}, 1, {4, inner - 4}, tps)},
          {"blocks.1.up", cut_in_pieces({inner, 4}, 1, all_but_last)}};
}

Cuts other_cuts(int tps, int64_t inner) {
  return {{"blocks.0.up", cut_evenly({inner, 4}, 1, tps)},
          {"blocks.1.up", cut_in_blocks({inner, 4}, 0, {2, 2, inner - 4}, tps)},
          {"blocks.1.down", cut_evenly({4, inner}, 0, tps)}};
}

}  // namespace dmuon::testing

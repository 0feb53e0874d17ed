// Weights fetched ahead of their use, and gradients that wait for their reduction.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>

#include "engine/engine.h"
#include "tests/support/tiny_training.h"

namespace dmuon {
namespace {

using namespace testing;

// On one rank of a job of `ranks`; what it returns is the first rank's.
void on_ranks(int ranks, const TinyOptions& options, const Script& script) {
  trained(ranks, options, script);
}

TinyOptions prefetching(Residency where = Residency::transient) {
  return {.residency = where, .prefetch = true};
}

at::Tensor batch_of(int seed, int rank, int n) {
  return share_of(tiny_batch(seed, kRows), rank, n);
}

TEST(Prefetch, ChangesNoBit) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto where : {Residency::transient, Residency::resident_after_forward}) {
      const Script script = [](TinyJob& job, int rank, int n) { plain_steps(job, rank, n, 3); };
      EXPECT_TRUE(same_bits(trained(ranks, prefetching(where), script),
                            trained(ranks, {.residency = where}, script)));
    }
  }
}

TEST(Prefetch, HoldsForEveryInterleavingOfTheRanks) {
  const Script script = [](TinyJob& job, int rank, int n) { plain_steps(job, rank, n, 3); };
  const Weights want = trained(3, {}, script);
  for (const uint64_t seed : {1, 2, 3}) {
    EXPECT_TRUE(same_bits(trained(3, prefetching(), script, seed), want));
  }
}

// Two blocks: one of them is fetched ahead in each direction, once a forward has shown the order.
TEST(Prefetch, TakesTheOrderOfTheForwardBefore) {
  on_ranks(2, prefetching(), [](TinyJob& job, int rank, int n) {
    plain_steps(job, rank, n, 1);
    EXPECT_EQ(job.engine->counters().prefetches, 1);  // backward knows its order at once
    plain_steps(job, rank, n, 2);
    EXPECT_EQ(job.engine->counters().prefetches, 1 + 2 * 2);
    EXPECT_EQ(job.engine->counters().materialisations, 3 * 4);
  });
}

TEST(Prefetch, IsOffUnlessTheRuntimeAsksForIt) {
  on_ranks(2, {}, [](TinyJob& job, int rank, int n) {
    plain_steps(job, rank, n, 2);
    EXPECT_EQ(job.engine->counters().prefetches, 0);
  });
}

TEST(Prefetch, OfAUnitThatIsNotUsedThenIsDropped) {
  on_ranks(2, prefetching(), [](TinyJob& job, int rank, int n) {
    plain_steps(job, rank, n, 1);
    const at::NoGradGuard no_grad;
    const at::Tensor x = batch_of(1, rank, n);
    job.block(0, x);  // and block 1, which came next last time, is on its way
    EXPECT_EQ(job.engine->counters().prefetches, 2);
    job.engine->begin_step();
    job.engine->end_step(false);
    for (const int unit : {0, 1}) EXPECT_FALSE(job.engine->store(unit).shown());
    EXPECT_THAT(job.seen_weights(), ::testing::SizeIs(4));  // and can be fetched again
  });
}

TEST(Prefetch, OfTheWrongUnitCostsNoCorrectness) {
  const Script script = [](TinyJob& job, int rank, int n) {
    plain_steps(job, rank, n, 1);
    for (const auto& [first, second] : {std::pair{1, 0}, std::pair{0, 1}, std::pair{0, 0}}) {
      job.zero_grad();
      loss_of(job.block(second, job.block(first, batch_of(first, rank, n)))).backward();
      job.step();
    }
  };
  EXPECT_TRUE(same_bits(trained(3, prefetching(), script), trained(3, {}, script)));
}

TEST(Prefetch, OfValuesThatAreSetMeanwhileGivesTheNewOnes) {
  on_ranks(2, prefetching(), [](TinyJob& job, int rank, int n) {
    plain_steps(job, rank, n, 1);
    const at::NoGradGuard no_grad;
    const at::Tensor h = job.block(0, batch_of(1, rank, n));  // block 1 is on its way
    for (const char* name : {"blocks.1.up", "blocks.1.down"}) {
      const int matrix = job.engine->plan().find(name);
      job.engine->set_value(matrix, at::zeros_like(job.parameter(name)));
    }
    EXPECT_EQ(job.block(1, h).abs().max().item<float>(), 0);
  });
}

// What was never reduced
// ----------------------------------------------------------------------------

TEST(Accumulation, IsReducedOnDemand) {
  for (const int ranks : {1, 2, 3}) {
    const auto got = trained(ranks, {}, [](TinyJob& job, int rank, int n) {
      job.adapter->sync = false;
      for (int micro = 0; micro < 3; ++micro) {
        loss_of(job.forward(batch_of(micro, rank, n))).backward();
      }
      job.engine->reduce_accumulated();
      job.step();
    });
    expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
      for (int micro = 0; micro < 3; ++micro) loss_of(reference.forward(x(micro))).backward();
      reference.step();
    });
  }
}

// One block in one micro-batch, the other in the next, which alone synchronises.
TEST(Accumulation, OfAUnitThatTheLastPassLeavesOutIsReducedOnDemand) {
  const auto got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    job.adapter->sync = false;
    loss_of(job.block(0, batch_of(1, rank, n))).backward();
    job.adapter->sync = true;
    loss_of(job.block(1, batch_of(2, rank, n))).backward();
    job.engine->reduce_accumulated();
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    loss_of(reference.block(0, x(1))).backward();
    loss_of(reference.block(1, x(2))).backward();
    reference.step();
  });
}

// A rank without any gradient of a unit takes part in its reduction.
TEST(Accumulation, OnSomeRanksOnlyIsReducedOnAll) {
  const auto got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    job.adapter->sync = false;
    const at::Tensor h = job.block(0, batch_of(1, rank, n), rank == 1 ? 1 : 2);
    loss_of(job.block(1, h)).backward();
    job.engine->reduce_accumulated();
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    for (int rank = 0; rank < 2; ++rank) {
      const at::Tensor h =
          reference.block(0, x(1).narrow(0, rank * kRows / 2, kRows / 2), rank == 1 ? 1 : 2);
      (loss_of(reference.block(1, h)) / 2).backward();
    }
    reference.step();
  });
}

TEST(Accumulation, ReducedTwiceIsReducedOnce) {
  const Script once = [](TinyJob& job, int rank, int n) {
    job.adapter->sync = false;
    loss_of(job.forward(batch_of(1, rank, n))).backward();
    job.engine->reduce_accumulated();
    job.step();
  };
  const Script twice = [](TinyJob& job, int rank, int n) {
    job.adapter->sync = false;
    loss_of(job.forward(batch_of(1, rank, n))).backward();
    job.engine->reduce_accumulated();
    job.engine->reduce_accumulated();
    job.step();
  };
  EXPECT_TRUE(same_bits(trained(2, {}, once), trained(2, {}, twice)));
}

}  // namespace
}  // namespace dmuon

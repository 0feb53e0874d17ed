// The life of a unit, on ranks that are threads, against the same job in one process and float64.
#include "engine/engine.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isnan.h>
#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <mutex>

#include "engine/error.h"
#include "tests/support/tiny_training.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using namespace testing;

class EveryResidency : public ::testing::TestWithParam<std::tuple<int, Residency>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  TinyOptions options() const { return {.residency = std::get<1>(GetParam())}; }
};

INSTANTIATE_TEST_SUITE_P(Engine, EveryResidency,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(Residency::transient,
                                                              Residency::resident_after_forward)));

TEST_P(EveryResidency, EqualsOneProcess) {
  for (const int steps : {1, 20}) {
    const auto script = [steps](TinyJob& job, int rank, int n) {
      plain_steps(job, rank, n, steps);
    };
    expect_equal_to_one_process(trained(size(), options(), script), reference_steps(steps));
  }
}

TEST_P(EveryResidency, TwoForwardsBeforeOneBackward) {
  const auto got = trained(size(), options(), [](TinyJob& job, int rank, int n) {
    const at::Tensor first = job.forward(share_of(tiny_batch(1, kRows), rank, n));
    const at::Tensor second = job.forward(share_of(tiny_batch(2, kRows), rank, n));
    (loss_of(first) + loss_of(second)).backward();
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    (loss_of(reference.forward(x(1))) + loss_of(reference.forward(x(2)))).backward();
    reference.step();
  });
}

TEST_P(EveryResidency, OneUnitTwiceInOneForward) {
  const auto twice = [](auto& job, const at::Tensor& x) {
    return loss_of(job.block(1, job.block(0, job.block(0, x))));
  };
  const auto got = trained(size(), options(), [&](TinyJob& job, int rank, int n) {
    twice(job, share_of(tiny_batch(1, kRows), rank, n)).backward();
    job.step();
  });
  expect_equal_to_one_process(got, [&](TinyReference& reference, const Batch& x) {
    twice(reference, x(1)).backward();
    reference.step();
  });
}

TEST_P(EveryResidency, TwoBackwardsThroughOneGraphAddUp) {
  const auto got = trained(size(), options(), [](TinyJob& job, int rank, int n) {
    const at::Tensor loss = loss_of(job.forward(share_of(tiny_batch(1, kRows), rank, n)));
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    (2 * loss_of(reference.forward(x(1)))).backward();
    reference.step();
  });
}

TEST_P(EveryResidency, MicroBatchesWithoutSyncEqualOneBatch) {
  const auto got = trained(size(), options(), [](TinyJob& job, int rank, int n) {
    for (int micro = 0; micro < 3; ++micro) {
      job.adapter->sync = micro == 2;
      loss_of(job.forward(share_of(tiny_batch(micro, kRows), rank, n))).backward();
    }
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    for (int micro = 0; micro < 3; ++micro) loss_of(reference.forward(x(micro))).backward();
    reference.step();
  });
}

TEST(Engine, APartUnusedOnOneRankCountsAsZeroThere) {
  const auto got = trained(3, {}, [](TinyJob& job, int rank, int n) {
    const at::Tensor h = job.block(0, share_of(tiny_batch(1, kRows), rank, n), rank == 1 ? 1 : 2);
    loss_of(job.block(1, h)).backward();
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    for (int rank = 0; rank < 3; ++rank) {  // the middle rank keeps its place when reversed
      const at::Tensor h =
          reference.block(0, x(1).narrow(0, rank * kRows / 3, kRows / 3), rank == 1 ? 1 : 2);
      (loss_of(reference.block(1, h)) / 3).backward();
    }
    reference.step();
  });
}

TEST(Engine, APartUnusedEverywhereKeepsWeightAndMomentum) {
  const Weights before = trained(2, {}, [](TinyJob&, int, int) {});
  const Weights got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    loss_of(job.block(0, share_of(tiny_batch(1, kRows), rank, n), /*used=*/1)).backward();
    EXPECT_TRUE(job.step());
    const auto& calls = job.optimizer->ns_calls_per_matrix();
    EXPECT_EQ(calls[job.engine->plan().find("blocks.0.down")], 0);
  });
  EXPECT_TRUE(got.at("blocks.0.down").equal(before.at("blocks.0.down")));
  EXPECT_TRUE(got.at("blocks.1.up").equal(before.at("blocks.1.up")));
  EXPECT_FALSE(got.at("blocks.0.up").equal(before.at("blocks.0.up")));
}

TEST(Engine, AStepWithoutAnyGradientChangesNothing) {
  const Weights before = trained(2, {}, [](TinyJob&, int, int) {});
  const Weights got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    job.forward(share_of(tiny_batch(1, kRows), rank, n));
    EXPECT_FALSE(job.step());
    EXPECT_FALSE(job.step());
  });
  EXPECT_TRUE(same_bits(got, before));
}

TEST(Engine, ClearedGradientsAreGone) {
  const Weights before = trained(2, {}, [](TinyJob&, int, int) {});
  const Weights got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    loss_of(job.forward(share_of(tiny_batch(1, kRows), rank, n))).backward();
    job.zero_grad();
    EXPECT_FALSE(job.step());
  });
  EXPECT_TRUE(same_bits(got, before));
}

TEST(Engine, BitsDoNotDependOnPackingResidencyOrTiming) {
  const Script script = [](TinyJob& job, int rank, int n) { plain_steps(job, rank, n, 5); };
  const Weights packed = trained(4, {}, script);
  EXPECT_TRUE(same_bits(packed, trained(4, {.pack = false}, script)));
  EXPECT_TRUE(
      same_bits(packed, trained(4, {.residency = Residency::resident_after_forward}, script)));
  for (const uint64_t seed : {1, 2, 3})
    EXPECT_TRUE(same_bits(packed, trained(4, {}, script, seed)));
}

TEST(Engine, NewtonSchulzRunsOncePerMatrixAndStepInTheWholeJob) {
  std::mutex mutex;
  std::vector<int64_t> calls(4, 0);
  trained(3, {}, [&](TinyJob& job, int rank, int n) {
    plain_steps(job, rank, n, 6);
    std::lock_guard lock(mutex);
    for (int m = 0; m < 4; ++m) calls[m] += job.optimizer->ns_calls_per_matrix()[m];
  });
  EXPECT_THAT(calls, ::testing::Each(6));
}

TEST(Engine, ANonOwnerHoldsNeitherWeightNorMomentumBetweenUses) {
  trained(4, {}, [](TinyJob& job, int rank, int n) {
    plain_steps(job, rank, n, 2);
    for (int m = 0; m < 4; ++m) {
      const Slot& slot = job.engine->slot(m);
      EXPECT_EQ(slot.parameter.storage().nbytes(), 4u);
      EXPECT_TRUE(at::isnan(slot.parameter.detach().sum()).item<bool>());
      if (slot.owned) continue;
      EXPECT_EQ(slot.whole.storage().nbytes(), 0u);
      EXPECT_TRUE(job.optimizer->state(m).empty());
      EXPECT_FALSE(slot.parameter.grad().defined());
    }
  });
}

TEST(Engine, BytesAreTwoMaterialisationsAndOneReduction) {
  for (const auto& [where, units] :
       {std::pair{Residency::transient, 3}, std::pair{Residency::resident_after_forward, 2}}) {
    std::mutex mutex;
    int64_t bytes = 0, presence = 4 * 4;  // one float per matrix
    trained(4, {.residency = where}, [&](TinyJob& job, int rank, int n) {
      plain_steps(job, rank, n, 2);
      std::lock_guard lock(mutex);
      bytes += job.engine->counters().sent_bytes_last_step;
    });
    EXPECT_EQ(bytes, 3 * (units * 4 * 28 * 4 + presence));
  }
}

TEST(Engine, ComputesInAnotherDtypeAndKeepsAFloat32Master) {
  trained(2, {.compute_dtype = at::kBFloat16}, [](TinyJob& job, int rank, int n) {
    for (int step = 0; step < 3; ++step) {
      job.zero_grad();
      const at::Tensor x = share_of(tiny_batch(step, kRows), rank, n).to(at::kBFloat16);
      loss_of(job.forward(x).to(at::kFloat)).backward();
      EXPECT_TRUE(job.step());
    }
    job.engine->wait_publishes();
    for (int m = 0; m < 4; ++m) {
      const Slot& slot = job.engine->slot(m);
      EXPECT_EQ(slot.parameter.scalar_type(), at::kFloat);
      EXPECT_EQ(slot.whole.scalar_type(), at::kBFloat16);
      if (!slot.owned) continue;
      const auto place = job.engine->place(m);
      const at::Tensor master = job.engine->store(place.unit).master(place.slot);
      EXPECT_EQ(master.scalar_type(), at::kFloat);
      EXPECT_TRUE(slot.whole.equal(master.to(at::kBFloat16)));
    }
  });
}

TEST(Engine, AfterAnExceptionInForwardTheNextStepIsRight) {
  const auto got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    job.engine->enter(0);  // and the forward throws: `leave` comes with no output
    job.engine->leave(0, {});
    plain_steps(job, rank, n, 1);
  });
  expect_equal_to_one_process(got, reference_steps(1));
}

TEST(Engine, AfterAnExceptionInBackwardTheNextStepIsRight) {
  const auto got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    const at::Tensor h = job.block(0, share_of(tiny_batch(7, kRows), rank, n));
    h.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("user"); });
    EXPECT_THROW(loss_of(job.block(1, h)).backward(), std::runtime_error);
    plain_steps(job, rank, n, 1);
  });
  expect_equal_to_one_process(got, reference_steps(1));
}

TEST(Engine, AfterAFailedBackwardAGraphBuiltBeforeItTrains) {
  const auto got = trained(2, {}, [](TinyJob& job, int rank, int n) {
    const at::Tensor h = job.block(0, share_of(tiny_batch(7, kRows), rank, n));
    h.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("user"); });
    const at::Tensor failing = loss_of(job.block(1, h));
    const at::Tensor other = loss_of(job.forward(share_of(tiny_batch(0, kRows), rank, n)));
    EXPECT_THROW(failing.backward(), std::runtime_error);
    job.zero_grad();
    other.backward();
    EXPECT_TRUE(job.step());
  });
  expect_equal_to_one_process(got, reference_steps(1));
}

TEST(Engine, StepRefusesGradientsThatWereNeverReduced) {
  trained(2, {}, [](TinyJob& job, int rank, int n) {
    job.adapter->sync = false;
    loss_of(job.forward(share_of(tiny_batch(1, kRows), rank, n))).backward();
    EXPECT_THAT([&] { job.step(); }, ThrowsMessage<ConfigError>(HasSubstr("no_sync")));
    job.zero_grad();
    EXPECT_FALSE(job.step());
  });
}

TEST(Engine, BackwardAfterTheStepChangedTheWeightsIsRefused) {
  trained(2, {}, [](TinyJob& job, int rank, int n) {
    const at::Tensor loss = loss_of(job.forward(share_of(tiny_batch(1, kRows), rank, n)));
    loss.backward({}, /*retain_graph=*/true);
    job.step();
    EXPECT_THAT([&] { loss.backward(); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("blocks.1"), HasSubstr("step"))));
  });
}

TEST(Engine, ANonfiniteGradientOnOneRankStopsAllBeforeAnythingChanges) {
  const Weights before = trained(3, {}, [](TinyJob&, int, int) {});
  const Weights got = trained(3, {}, [](TinyJob& job, int rank, int n) {
    at::Tensor x = share_of(tiny_batch(1, kRows), rank, n);
    if (rank == 2) x.fill_(INFINITY);
    loss_of(job.forward(x)).backward();
    EXPECT_THAT([&] { job.step(); }, ThrowsMessage<RuntimeFailure>(
                                         AllOf(HasSubstr("blocks."), HasSubstr("not finite"))));
    for (int m = 0; m < 4; ++m) {
      for (const auto& [name, momentum] : job.optimizer->state(m)) {
        EXPECT_EQ(momentum.abs().sum().item<float>(), 0) << name;
      }
    }
  });
  EXPECT_TRUE(same_bits(got, before));
}

TEST(Engine, ASkippedStepIsSkippedByAll) {
  const auto got = trained(3, {.nonfinite = Nonfinite::skip}, [](TinyJob& job, int rank, int n) {
    at::Tensor x = share_of(tiny_batch(9, kRows), rank, n);
    if (rank == 1) x.fill_(NAN);
    loss_of(job.forward(x)).backward();
    EXPECT_FALSE(job.step());
    plain_steps(job, rank, n, 1);
  });
  expect_equal_to_one_process(got, reference_steps(1));
}

TEST(Engine, AFailedBroadcastRaisesOnEveryRank) {
  SimWorld world(3);
  world.fail(1, 0, "the wire is cut", "materialise");
  std::atomic<int> raised = 0;
  run_ranks(3, [&](int rank) {
    TinyJob job(world, rank);
    EXPECT_THROW(job.forward(share_of(tiny_batch(1, kRows), rank, 3)), RuntimeFailure);
    ++raised;
  });
  EXPECT_EQ(raised, 3);
}

TEST(Engine, AFailedReductionRaisesInBackwardOnEveryRank) {
  SimWorld world(2);
  world.fail(0, 1, "the wire is cut", "reduce");
  std::atomic<int> raised = 0;
  run_ranks(2, [&](int rank) {
    TinyJob job(world, rank);
    const at::Tensor loss = loss_of(job.forward(share_of(tiny_batch(1, kRows), rank, 2)));
    EXPECT_THROW(loss.backward(), std::runtime_error);
    ++raised;
  });
  EXPECT_EQ(raised, 2);
}

}  // namespace
}  // namespace dmuon

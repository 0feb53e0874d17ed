// What a user may do to gradients between passes and steps.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include <cmath>

#include "engine/engine.h"
#include "engine/gradients.h"
#include "tests/engine/any_mesh.h"

namespace dmuon {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using namespace testing;

class MeshGradients : public AnyMesh {};

INSTANTIATE_TEST_SUITE_P(Engine, MeshGradients,
                         ::testing::Values(MeshCase{2, 2, 1}, MeshCase{1, 2, 2}, MeshCase{2, 2, 2}),
                         mesh_name);

// On the ranks that have the matrix' gradient.
void change(TinyJob& job, const std::string& name, const std::function<void(at::Tensor&)>& f) {
  at::NoGradGuard no_grad;
  at::Tensor& gradient = job.parameter(name).mutable_grad();
  if (gradient.defined()) f(gradient);
}

double norm_of(const TinyReference& reference) {
  double squares = 0;
  for (const auto& [name, weight] : reference.weights()) {
    squares += weight.grad().pow(2).sum().item<double>();
  }
  return std::sqrt(squares);
}

TEST_P(MeshGradients, ClearedGradientsAreGone) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    backward(job, share(1, cell, cells));
    job.zero_grad();
    EXPECT_FALSE(job.step());
  });
  EXPECT_TRUE(same_bits(got, untrained()));
}

TEST_P(MeshGradients, AMatrixWhoseGradientIsClearedKeepsItsWeight) {
  for (const char* cleared : kNames) {
    const auto got = run([cleared](TinyJob& job, int cell, int cells) {
      backward(job, share(1, cell, cells));
      job.parameter(cleared).mutable_grad() = at::Tensor();
      EXPECT_TRUE(job.step());
    });
    EXPECT_TRUE(got.at(cleared).equal(untrained().at(cleared)));
    expect_equal_to_one_process(got, [cleared](TinyReference& reference, const Batch& x) {
      backward(reference, x(1));
      reference.parameter(cleared).mutable_grad() = at::Tensor();
      reference.step();
    });
  }
}

TEST_P(MeshGradients, GradientsScaledInPlaceAreWhatIsUsed) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    backward(job, share(1, cell, cells));
    change(job, "blocks.0.up", [](at::Tensor& gradient) { gradient.mul_(4); });
    change(job, "blocks.1.down", [](at::Tensor& gradient) { gradient.mul_(-1); });
    job.step();
    job.zero_grad();
    backward(job, share(2, cell, cells));
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    backward(reference, x(1));
    reference.parameter("blocks.0.up").mutable_grad().mul_(4);
    reference.parameter("blocks.1.down").mutable_grad().mul_(-1);
    reference.step();
    reference.zero_grad();
    backward(reference, x(2));
    reference.step();
  });
}

TEST_P(MeshGradients, ReplacedGradientsAreWhatIsUsedAndLaterPassesAddToThem) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    backward(job, share(1, cell, cells));
    for (const char* name : kNames) {
      change(job, name, [](at::Tensor& gradient) { gradient = gradient * -2; });
    }
    backward(job, share(2, cell, cells));
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    (loss_of(reference.forward(x(1))) * -2).backward();
    backward(reference, x(2));
    reference.step();
  });
}

// The others of the cell have theirs still.
TEST_P(MeshGradients, AGradientClearedOnOneTpRankIsZeroThere) {
  const int tp = GetParam().tp;
  const auto got = run([tp](TinyJob& job, int cell, int cells) {
    backward(job, share(1, cell, cells));
    if (job.grid().position().tp == tp - 1)
      job.parameter("blocks.0.up").mutable_grad() = at::Tensor();
    job.step();
  });
  expect_equal_to_one_process(got, [tp](TinyReference& reference, const Batch& x) {
    backward(reference, x(1));
    at::Tensor& gradient = reference.parameter("blocks.0.up").mutable_grad();
    if (tp == 1) {
      gradient = at::Tensor();
    } else {
      gradient.index_fill_(0, indices_on(some_cuts(tp).at("blocks.0.up"), tp - 1), 0);
    }
    reference.step();
  });
}

TEST_P(MeshGradients, ScalingAllGradientsGathersNothingAgain) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    const GradientSet all{.matrices = {0, 1, 2, 3}};
    for (int step = 0; step < 3; ++step) {
      job.zero_grad();
      backward(job, share(step, cell, cells));
      scale_gradients(*job.engine, all, 0.1 / gradient_norm(*job.engine, all, 2));
      job.step();
    }
    EXPECT_EQ(job.engine->counters().tp_regathers, 0);
  });
  expect_equal_to_one_process(got, [&](TinyReference& reference, const Batch& x) {
    for (int step = 0; step < 3; ++step) {
      reference.zero_grad();
      backward(reference, x(step));
      const double factor = 0.1 / norm_of(reference);
      for (const char* name : kNames) reference.parameter(name).mutable_grad().mul_(factor);
      reference.step();
    }
  });
}

TEST_P(MeshGradients, AMicroBatchWithoutSyncAfterOneWithSyncCounts) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    for (const bool sync : {true, false, true}) {
      job.adapter->sync = sync;
      backward(job, share(sync, cell, cells));
    }
    job.step();
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    for (const int seed : {1, 0, 1}) backward(reference, x(seed));
    reference.step();
  });
}

// The owner's counts, and a step may come before the next forward.
TEST_P(MeshGradients, AfterAnExceptionInBackwardTheNextStepIsRight) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    const at::Tensor h = job.block(0, share(7, cell, cells));
    h.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("user"); });
    EXPECT_THROW(loss_of(job.block(1, h)).backward(), std::runtime_error);
    plain_steps(job, cell, cells, 1);
    EXPECT_EQ(job.engine->counters().aborted_passes, 1);
  });
  expect_equal_to_one_process(got, reference_steps(1));
}

TEST_P(MeshGradients, ANonfiniteOneInOneShardStopsAllRanksBeforeAnythingChanges) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    backward(job, share(1, cell, cells));
    change(job, "blocks.0.up", [](at::Tensor& gradient) { gradient.view({-1})[0] = NAN; });
    EXPECT_THAT([&] { job.step(); },
                ThrowsMessage<RuntimeFailure>(HasSubstr("'blocks.0.up' is not finite")));
    for (int m = 0; m < 4; ++m) {
      for (const auto& [name, momentum] : job.optimizer->state(m)) {
        EXPECT_EQ(momentum.abs().sum().item<float>(), 0) << name;
      }
    }
  });
  EXPECT_TRUE(same_bits(got, untrained()));
}

TEST_P(MeshGradients, StepRefusesGradientsThatWereNeverReducedOnEveryRank) {
  run([](TinyJob& job, int cell, int cells) {
    job.adapter->sync = false;
    backward(job, share(1, cell, cells));
    EXPECT_THAT([&] { job.step(); }, ThrowsMessage<ConfigError>(HasSubstr("no_sync")));
    job.zero_grad();
    EXPECT_FALSE(job.step());
  });
}

}  // namespace
}  // namespace dmuon

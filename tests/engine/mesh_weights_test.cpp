// What may happen to weights between steps: used or not, frozen, set.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include <mutex>

#include "engine/engine.h"
#include "tests/engine/any_mesh.h"

namespace dmuon {
namespace {

using namespace testing;

class MeshWeights : public AnyMesh {};

// What a TP rank sees is its part of the masters, in the dtype that it computes in.
void expect_seen(const TinyOptions& options, const Weights& masters, int tp, const Weights& seen) {
  for (const auto& [name, weight] : seen) {
    const auto cut = options.cuts.find(name);
    const TpLayout layout = cut == options.cuts.end() ? TpLayout() : cut->second;
    const at::Tensor expected = shard_of(masters.at(name), layout, tp).to(options.compute_dtype);
    EXPECT_TRUE(weight.equal(expected)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Engine, MeshWeights,
                         ::testing::Values(MeshCase{2, 2, 1}, MeshCase{1, 2, 2}, MeshCase{2, 2, 2}),
                         mesh_name);

TEST_P(MeshWeights, AMatrixThatNoForwardUsesKeepsWeightAndMomentum) {
  const auto script = [](auto& job, const at::Tensor& first, const at::Tensor& second) {
    loss_of(job.block(1, job.block(0, first))).backward();
    job.step();
    job.zero_grad();
    loss_of(job.block(1, job.block(0, second, /*used=*/1))).backward();
    job.step();
  };
  const auto got = run([&](TinyJob& job, int cell, int cells) {
    script(job, share(1, cell, cells), share(2, cell, cells));
  });
  expect_equal_to_one_process(
      got, [&](TinyReference& reference, const Batch& x) { script(reference, x(1), x(2)); });
}

TEST_P(MeshWeights, AUnitThatNoForwardUsesKeepsItsWeights) {
  const auto script = [](auto& job, const at::Tensor& x) {
    loss_of(job.block(1, x)).backward();
    job.step();
  };
  const auto got = run([&](TinyJob& job, int cell, int cells) {
    script(job, share(1, cell, cells));
    plain_steps(job, cell, cells, 1);
  });
  expect_equal_to_one_process(got, [&](TinyReference& reference, const Batch& x) {
    script(reference, x(1));
    reference_steps(1)(reference, x);
  });
}

TEST_P(MeshWeights, AFrozenMatrixKeepsItsWeight) {
  for (const std::set<std::string>& frozen :
       {std::set<std::string>{"blocks.0.up"}, {"blocks.0.up", "blocks.0.down"}}) {
    TinyOptions options = this->options();
    options.frozen = frozen;
    const auto got =
        run(options, [](TinyJob& job, int cell, int cells) { plain_steps(job, cell, cells, 3); });
    expect_equal_to_one_process(got, [&](TinyReference& reference, const Batch& x) {
      for (const auto& name : frozen) reference.parameter(name).set_requires_grad(false);
      reference_steps(3)(reference, x);
    });
  }
}

// Though it has a gradient.
TEST_P(MeshWeights, AUnitFrozenAfterBackwardKeepsItsWeightsEverywhere) {
  std::mutex mutex;
  std::vector<std::pair<int, Weights>> seen;
  const auto got = run([&](TinyJob& job, int cell, int cells) {
    plain_steps(job, cell, cells, 1);
    for (const char* name : kNames) job.parameter(name).set_requires_grad(false);
    EXPECT_TRUE(job.step());
    Weights weights = job.seen_weights();
    std::lock_guard lock(mutex);
    seen.emplace_back(job.grid().position().tp, std::move(weights));
  });
  expect_equal_to_one_process(got, reference_steps(1));
  for (const auto& [tp, weights] : seen) expect_seen(options(), got, tp, weights);
}

TEST_P(MeshWeights, AValueSetIsWhatEveryRankSeesAndTrains) {
  const auto value = [](const std::string& name) { return initial_weights().at(name) * 0.5; };
  const auto got = run([&](TinyJob& job, int cell, int cells) {
    plain_steps(job, cell, cells, 2);
    const int tp = job.grid().position().tp;
    for (const char* name : {"blocks.0.down", "blocks.1.down"}) {
      job.engine->set_value(job.engine->plan().find(name),
                            shard_of(value(name), job.layout(name), tp).to(at::kFloat));
    }
    for (const char* name : {"blocks.0.down", "blocks.1.down"}) {
      const at::Tensor seen = job.seen_weights().at(name);
      EXPECT_TRUE(seen.equal(shard_of(value(name), job.layout(name), tp).to(at::kFloat)));
    }
    plain_steps(job, cell, cells, 1);
  });
  expect_equal_to_one_process(got, [&](TinyReference& reference, const Batch& x) {
    reference_steps(2)(reference, x);
    {
      at::NoGradGuard no_grad;
      for (const char* name : {"blocks.0.down", "blocks.1.down"}) {
        reference.parameter(name).copy_(value(name));
      }
    }
    reference_steps(1)(reference, x);
  });
}

TEST_P(MeshWeights, AValueSetDifferentlyOnEachRankIsTheOwnersEverywhere) {
  for (const bool step_between : {false, true}) {
    std::mutex mutex;
    std::vector<Weights> seen;
    run([&](TinyJob& job, int cell, int cells) {
      plain_steps(job, cell, cells, 1);
      job.zero_grad();
      backward(job, share(1, cell, cells));
      const Position& me = job.grid().position();
      const at::Tensor value = at::full({4, kInner}, 1.0f + me.tp + 10 * cell);
      job.engine->set_value(job.engine->plan().find("blocks.1.down"), value);
      if (step_between) job.step();
      Weights weights = job.seen_weights();
      std::lock_guard lock(mutex);
      seen.push_back(std::move(weights));
    });
    for (const Weights& weights : seen) {
      EXPECT_TRUE(weights.at("blocks.1.down").equal(seen.front().at("blocks.1.down")));
    }
  }
}

TEST_P(MeshWeights, TwoStepsOnOneGradientAreTwoSteps) {
  const auto got = run([](TinyJob& job, int cell, int cells) {
    backward(job, share(1, cell, cells));
    EXPECT_TRUE(job.step());
    EXPECT_TRUE(job.step());
  });
  expect_equal_to_one_process(got, [](TinyReference& reference, const Batch& x) {
    backward(reference, x(1));
    reference.step();
    reference.step();
  });
}

TEST_P(MeshWeights, GradientsSetBeforeAnyForwardTrain) {
  const auto gradient = [](const std::string& name) { return initial_weights().at(name).sin(); };
  const auto got = run([&](TinyJob& job, int cell, int cells) {
    for (const char* name : kNames) {
      if (!job.slot(name).owned) continue;
      const int tp = job.grid().position().tp;
      job.parameter(name).mutable_grad() =
          shard_of(gradient(name), job.layout(name), tp).to(at::kFloat);
    }
    EXPECT_TRUE(job.step());
    job.zero_grad();
    plain_steps(job, cell, cells, 1);
  });
  expect_equal_to_one_process(got, [&](TinyReference& reference, const Batch& x) {
    for (const char* name : kNames) {
      at::Tensor weight = reference.parameter(name);
      weight.mutable_grad() = gradient(name).to(weight.scalar_type());
    }
    reference.step();
    reference_steps(1)(reference, x);
  });
}

// A forward right after an asynchronous step, on every rank.
TEST_P(MeshWeights, AnotherComputeDtypeIsTheMasterRounded) {
  TinyOptions options = this->options();
  options.compute_dtype = at::kBFloat16;
  std::mutex mutex;
  std::vector<std::pair<int, Weights>> seen;
  const auto got = run(options, [&](TinyJob& job, int cell, int cells) {
    for (int step = 0; step < 3; ++step) {
      job.zero_grad();
      loss_of(job.forward(share(step, cell, cells).to(at::kBFloat16)).to(at::kFloat)).backward();
      EXPECT_TRUE(job.step());
    }
    Weights weights = job.seen_weights();
    std::lock_guard lock(mutex);
    seen.emplace_back(job.grid().position().tp, std::move(weights));
  });
  for (const auto& [tp, weights] : seen) expect_seen(options, got, tp, weights);
}

// AdamW divides by the gradient's own size: rounding moves an element by more than its own where
// its gradient is nearly zero, but by no more than a small part of lr.
TEST_P(MeshWeights, TheAdamwRouteEqualsOneRank) {
  TinyOptions one, options = this->options();
  one.adamw = options.adamw = {"blocks.0.up", "blocks.1.down"};
  const Script script = [](TinyJob& job, int cell, int cells) { plain_steps(job, cell, cells, 3); };
  const auto got = run(options, script), expected = trained(1, one, script);
  for (const auto& name : one.adamw) {
    const double worst = (got.at(name) - expected.at(name)).abs().max().item<double>();
    EXPECT_LE(worst, 3 * 0.05 * 1e-3) << name;
  }
}

}  // namespace
}  // namespace dmuon

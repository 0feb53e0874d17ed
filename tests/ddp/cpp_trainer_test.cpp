#include <ATen/core/Dict.h>
#include <ATen/ops/full.h>
#include <ATen/ops/relu.h>
#include <gmock/gmock.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "adapters/ddp/distributed_muon.h"
#include "engine/error.h"
#include "tests/ddp/tiny_net.h"
#include "tests/support/thread_group.h"

namespace dmuon::testing {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Throws;
using ::testing::ThrowsMessage;
using ::testing::UnorderedElementsAre;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

bool is_hidden(const std::string& name, const at::Tensor& parameter) {
  return name.starts_with("blocks.") && parameter.dim() == 2;
}

using Net = std::shared_ptr<TinyNet>;
Net net_with(uint64_t seed) { return std::make_shared<TinyNet>(seed); }

// One rank's part of a job.
class Rank final : public Job {
 public:
  explicit Rank(const Group& group, MuonOptions options = kOptions, Net model = net_with(1))
      : group_(group), net(model), trainer(net, split_of(group), is_hidden, options) {}

  at::Tensor forward(const at::Tensor& x) {
    return trainer.forward([&] { return net->forward(x, enter_); });
  }
  void enter_blocks() {
    enter_ = [this](int i, const auto& f) {
      return trainer.forward("blocks." + std::to_string(i), f);
    };
  }

  void backward(int seed) override {
    const at::Tensor x = batch(seed).to(at::kFloat).chunk(group_->getSize())[group_->getRank()];
    loss_of(forward(x)).backward();
  }
  void accumulate(int seed) override {
    const auto guard = trainer.no_sync();
    backward(seed);
  }
  void zero_grad() override { trainer.zero_grad(); }
  double clip(double max_norm) override { return trainer.clip_grad_norm(max_norm); }
  void step() override { EXPECT_TRUE(trainer.step()); }
  void set_lr(double lr, double adamw_lr) override {
    trainer.options().lr = lr;
    trainer.options().adamw_lr = adamw_lr;
  }

  Weights weights() {
    trainer.wait();
    return weights_of(*net);
  }

 private:
  const Group group_;
  TinyNet::Enter enter_ = [](int, const auto& f) { return f(); };

 public:
  const Net net;
  DistributedMuon trainer;
};

bool same_bits(const Weights& a, const Weights& b) {
  return a.size() == b.size() && std::all_of(a.begin(), a.end(), [&](const auto& item) {
           return item.second.equal(b.at(item.first));
         });
}

// What every rank ends with; expects them to be the same bits.
template <class F>
Weights on_ranks(int ranks, const F& f) {
  std::vector<Weights> all(ranks);
  run_ranks(ranks, [&](const Group& group) { all[group->getRank()] = f(group); });
  for (const Weights& other : all) EXPECT_TRUE(same_bits(other, all[0]));
  return all[0];
}

Weights trained(int ranks, const Script& script, const MuonOptions& options = kOptions) {
  return on_ranks(ranks, [&](const Group& group) {
    Rank rank(group, options);
    script(rank);
    return rank.weights();
  });
}

void expect_as_one_process(int ranks, const Script& script) {
  const Expected expected = expected_of(script);
  EXPECT_LE(relative_error(trained(ranks, script), expected.weights), expected.tolerance);
}

void steps(Job& job, int first, int count) {
  for (int seed = first; seed < first + count; ++seed) {
    job.zero_grad();
    job.backward(seed);
    job.step();
  }
}

class OnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(CppTrainer, OnRanks, ::testing::Values(1, 2, 3, 4));

// One block is never called.
TEST_P(OnRanks, TrainAsOneProcess) {
  expect_as_one_process(GetParam(), [](Job& job) { steps(job, 0, 4); });
}

class CountWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    EXPECT_THAT(warning.msg(), HasSubstr("came with other initial values than rank 0"));
    ++count;
  }
  int count = 0;
};

TEST(CppTrainer, RanksBeginWithTheWeightsOfRank0AndAreToldSoOnce) {
  const Script script = [](Job& job) { steps(job, 0, 2); };
  const Weights unequal = on_ranks(3, [&](const Group& group) {
    CountWarnings warnings;  // of this thread
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    Rank rank(group, kOptions, net_with(1 + group->getRank()));
    EXPECT_EQ(warnings.count, group->getRank() == 0 ? 0 : 1);
    script(rank);
    return rank.weights();
  });
  EXPECT_TRUE(same_bits(unequal, trained(3, script)));
}

TEST(CppTrainer, AccumulatesWithoutReducing) {
  expect_as_one_process(4, [](Job& job) {
    for (int step = 0; step < 3; ++step) {
      job.zero_grad();
      job.accumulate(10 * step);
      job.accumulate(10 * step + 1);
      job.backward(10 * step + 2);
      job.step();
    }
  });
}

TEST(CppTrainer, EveryRankKeepsItsOwnGradientsUnderNoSync) {
  std::vector<at::Tensor> muon(2), adamw(2);
  run_ranks(2, [&](const Group& group) {
    Rank rank(group);
    rank.accumulate(0);
    EXPECT_EQ(rank.trainer.engine().counters().reductions, 0);
    muon[group->getRank()] = rank.net->named_parameters()["blocks.0.weight"].grad();
    adamw[group->getRank()] = rank.net->named_parameters()["first.weight"].grad();
  });
  EXPECT_FALSE(muon[0].equal(muon[1]));
  EXPECT_FALSE(adamw[0].equal(adamw[1]));
}

TEST(CppTrainer, AccumulatesWhatHasBeenReduced) {
  expect_as_one_process(4, [](Job& job) {
    job.backward(0);
    job.backward(1);
    job.step();
  });
}

TEST(CppTrainer, ClipsTheNormOfTheWholeModel) {
  expect_as_one_process(4, [](Job& job) {
    for (int step = 0; step < 3; ++step) {
      job.zero_grad();
      job.backward(step);
      EXPECT_GT(job.clip(0.05), 0.05);
      job.step();
    }
  });
}

TEST(CppTrainer, ReadsTheRatesAtEachStep) {
  expect_as_one_process(3, [](Job& job) {
    for (int step = 0; step < 4; ++step) {
      job.set_lr(0.03 / (1 + step), 0.004 / (1 + step));
      steps(job, step, 1);
    }
  });
}

TEST(CppTrainer, BlocksThatReportTheirOwnCallsGiveTheSameBits) {
  const auto run = [](const Group& group, bool blocks) {
    MuonOptions options = kOptions;
    if (blocks) options.blocks = {"blocks.0", "blocks.1", "blocks.2", "blocks.3"};
    Rank rank(group, options);
    if (blocks) rank.enter_blocks();
    steps(rank, 0, 4);
    return rank.weights();
  };
  const Weights with = on_ranks(4, [&](const Group& group) { return run(group, true); });
  EXPECT_TRUE(same_bits(with, on_ranks(4, [&](const Group& group) { return run(group, false); })));
}

TEST(CppTrainer, PublishingBesideTheNextForwardGivesTheSameBits) {
  const Script script = [](Job& job) { steps(job, 0, 4); };
  MuonOptions options = kOptions;
  options.publish_async = !options.publish_async;
  EXPECT_TRUE(same_bits(trained(4, script, options), trained(4, script)));
}

TEST(CppTrainer, RunsNewtonSchulzOncePerMatrixAndStepInTheJob) {
  std::vector<int64_t> calls(4), owned(4);
  run_ranks(4, [&](const Group& group) {
    Rank rank(group);
    steps(rank, 0, 3);
    calls[group->getRank()] = rank.trainer.ns_calls();
    for (const auto& [name, owner] : rank.trainer.owners()) {
      owned[group->getRank()] += owner == group->getRank() && name != kUnused;
    }
  });
  EXPECT_THAT(owned, UnorderedElementsAre(1, 1, 1, 0));
  for (auto& count : owned) count *= 3;
  EXPECT_THAT(calls, ElementsAreArray(owned));
}

TEST(CppTrainer, BuffersAreRankZerosInEachForward) {
  run_ranks(3, [](const Group& group) {
    Rank rank(group);
    rank.net->scale.fill_(2.f + static_cast<float>(group->getRank()));
    rank.backward(0);
    EXPECT_EQ(rank.net->scale.item<float>(), 2);
    rank.net->eval();
    rank.net->scale.fill_(2.f + static_cast<float>(group->getRank()));
    rank.forward(batch(0).to(at::kFloat));
    EXPECT_EQ(rank.net->scale.item<float>(), 2 + group->getRank());
  });
}

TEST(CppTrainer, AFailedForwardChangesNothing) {
  const Weights failed = on_ranks(2, [](const Group& group) {
    Rank rank(group);
    const auto fails = [&]() -> at::Tensor { throw std::logic_error("no data"); };
    EXPECT_THROW(rank.trainer.forward(fails), std::logic_error);
    steps(rank, 0, 2);
    return rank.weights();
  });
  EXPECT_TRUE(same_bits(failed, trained(2, [](Job& job) { steps(job, 0, 2); })));
}

// Files.

std::string file(const std::string& name) { return ::testing::TempDir() + "cpp_trainer_" + name; }

void save(int ranks, const std::string& path) {
  run_ranks(ranks, [&](const Group& group) {
    Rank rank(group);
    steps(rank, 0, 3);
    rank.trainer.save(path);
  });
}

// "section/name" -> tensor
Weights read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(in), {});
  Weights all;
  for (const auto& section : torch::jit::pickle_load(bytes).toGenericDict()) {
    for (const auto& entry : section.value().toGenericDict()) {
      all[section.key().toStringRef() + "/" + entry.key().toStringRef()] = entry.value().toTensor();
    }
  }
  return all;
}

TEST(CppTrainer, GoesOnFromAFileWithTheSameBits) {
  const std::string path = file("goes_on");
  save(4, path);
  const Weights loaded = on_ranks(4, [&](const Group& group) {
    Rank rank(group);
    steps(rank, 7, 1);  // a state of its own, to be forgotten
    rank.trainer.load(path);
    steps(rank, 3, 2);
    return rank.weights();
  });
  EXPECT_TRUE(same_bits(loaded, trained(4, [](Job& job) { steps(job, 0, 5); })));
}

TEST(CppTrainer, AnyNumberOfRanksTakesTheWholeStateFromAFile) {
  const std::string path = file("whole"), again = file("again");
  save(4, path);
  const Weights saved = read(path);
  EXPECT_EQ(saved.count(std::string("momentum_buffer/blocks.0.weight")), 1u);
  EXPECT_EQ(saved.at("step/first.bias").item<int64_t>(), 3);
  for (const int ranks : {1, 2, 3}) {
    const Weights shown = on_ranks(ranks, [&](const Group& group) {
      Rank rank(group);
      rank.trainer.load(path);
      rank.trainer.save(again);
      return rank.weights();
    });
    EXPECT_TRUE(same_bits(read(again), saved));
    for (const auto& [name, value] : shown) EXPECT_TRUE(value.equal(saved.at("weights/" + name)));
  }
}

// Bad input: each rank must throw the same text.

template <class F>
std::string text_on_all(int ranks, const F& f) {
  std::vector<std::string> texts(ranks);
  run_ranks(ranks, [&](const Group& group) {
    try {
      f(group);
    } catch (const std::exception& error) {
      texts[group->getRank()] = error.what();
    }
  });
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

void make(const Group& group, const Select& select, const MuonOptions& options = {}) {
  DistributedMuon(net_with(1), split_of(group), select, options);
}

TEST(CppTrainer, NamesWhatCannotBeChosen) {
  const auto all = [](const auto&, const auto&) { return true; };
  EXPECT_THAT(text_on_all(3, [&](const Group& group) { make(group, all); }),
              HasSubstr("'first.bias' is chosen for Muon and is a CPUFloatType of sizes [8]"));
  const auto none = [](const auto&, const auto&) { return false; };
  EXPECT_THAT(text_on_all(3, [&](const Group& group) { make(group, none); }),
              HasSubstr("none of the 12 parameters ('first.weight', ...) is chosen for Muon"));
}

TEST(CppTrainer, NamesWhatRanksChooseDifferently) {
  const auto text = text_on_all(3, [](const Group& group) {
    make(group, [&](const auto& name, const auto& parameter) {
      return is_hidden(name, parameter) && (group->getRank() != 2 || name != "blocks.1.weight");
    });
  });
  EXPECT_THAT(text, HasSubstr("the ranks do not make the same DistributedMuon"));
  EXPECT_THAT(text, HasSubstr("blocks.1.weight"));
}

TEST(CppTrainer, NamesABadOptionAndItsRank) {
  const auto text = text_on_all(3, [](const Group& group) {
    MuonOptions options;
    options.momentum = group->getRank() == 1 ? 1.5 : 0.9;
    make(group, is_hidden, options);
  });
  EXPECT_EQ(text, "on rank 1: momentum is 1.5; it must be at least 0 and below 1.");
  EXPECT_THAT(text_on_all(2, [](const Group& g) { make(g, is_hidden, {.blocks = {"block"}}); }),
              HasSubstr("blocks names 'block', which is no module of the model"));
}

TEST(CppTrainer, RefusesABadRateAtTheStepAndChangesNothing) {
  const Weights weights = on_ranks(2, [](const Group& group) {
    Rank rank(group);
    rank.backward(0);
    rank.trainer.options().lr = group->getRank() == 1 ? -1 : 0.02;
    EXPECT_THAT([&] { rank.trainer.step(); },
                Throws<std::exception>(::testing::Property(
                    &std::exception::what, HasSubstr("lr is -1; it must be at least 0"))));
    return rank.weights();
  });
  EXPECT_TRUE(same_bits(weights, weights_of(TinyNet(1))));
}

TEST(CppTrainer, NeedsAModelAndGroups) {
  run_ranks(2, [](const Group& group) {
    EXPECT_THAT([&] { DistributedMuon(nullptr, split_of(group), is_hidden); },
                ThrowsMessage<ConfigError>(HasSubstr("the model is null")));
    EXPECT_THAT([&] { DistributedMuon(net_with(1), split_of(nullptr), is_hidden); },
                ThrowsMessage<ConfigError>(HasSubstr("the process group is null")));
    const MakeGroup none = [](const std::string&) { return Group(); };
    EXPECT_THAT([&] { DistributedMuon(net_with(1), none, is_hidden); },
                ThrowsMessage<ConfigError>(HasSubstr("there is no process group for 'control'")));
  });
}

TEST(CppTrainer, ABlockMustBeAmongTheOptions) {
  run_ranks(1, [](const Group& group) {
    Rank rank(group);
    rank.enter_blocks();
    EXPECT_THAT(
        [&] { rank.backward(0); },
        ThrowsMessage<ConfigError>(HasSubstr("'blocks.0') is not one of the options' blocks")));
  });
}

TEST(CppTrainer, NamesAGradientOfACallThatItHasNotSeen) {
  const auto beside = text_on_all(2, [](const Group& group) {
    Rank rank(group);
    const auto output =
        rank.net->forward(batch(0).to(at::kFloat), [](int, const auto& f) { return f(); });
    loss_of(output).backward();
    rank.trainer.step();
  });
  EXPECT_THAT(beside, HasSubstr("'first.weight' has a gradient, and no call of the model went"));
  const auto block = text_on_all(2, [](const Group& group) {
    MuonOptions options;
    options.blocks = {"blocks.1"};
    Rank rank(group, options);
    rank.backward(0);
    rank.trainer.step();
  });
  EXPECT_THAT(block, HasSubstr("'blocks.1.weight' has a gradient, and no call of 'blocks.1' went"));
}

TEST(CppTrainer, AGradientThatIsNotFiniteStopsAllRanks) {
  const auto text = text_on_all(2, [](const Group& group) {
    Rank rank(group);
    const at::Tensor x = at::full({2, TinyNet::kIn}, std::nan(""), at::kFloat);
    loss_of(rank.forward(group->getRank() == 1 ? x : batch(0).to(at::kFloat))).backward();
    rank.trainer.step();
  });
  EXPECT_THAT(text, HasSubstr("not finite"));
}

TEST(CppTrainer, NamesAFileThatDoesNotFit) {
  const auto load = [](const std::string& path) {
    return text_on_all(2, [&](const Group& group) { Rank(group).trainer.load(path); });
  };
  EXPECT_THAT(load(file("nowhere")), HasSubstr("cannot be read on rank 0"));
  std::ofstream(file("text")) << "no archive";
  EXPECT_THAT(load(file("text")), HasSubstr("is not a file that save() has written"));
  c10::Dict<std::string, c10::Dict<std::string, at::Tensor>> other;
  const auto bytes = torch::jit::pickle_save(other);
  std::ofstream(file("other"), std::ios::binary).write(bytes.data(), std::ssize(bytes));
  EXPECT_THAT(load(file("other")), HasSubstr("weights of 'first.weight' is missing"));
  EXPECT_THAT(text_on_all(2, [&](const Group& g) { Rank(g).trainer.save("/nowhere/at/all"); }),
              HasSubstr("'/nowhere/at/all' cannot be written"));
}

}  // namespace
}  // namespace dmuon::testing

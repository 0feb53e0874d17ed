// Trains a small network on as many processes as mpirun starts: Muon for its hidden matrices, each
// on one owner, AdamW for the rest. The loss does not depend on the number of processes (where
// they share the 64 rows of a batch evenly).
//
//   mpirun -n 4 train_mlp [steps [checkpoint]]
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

#include "dmuon/adapters/ddp/distributed_muon.h"
#include "mpi_backend.h"

namespace {

constexpr int64_t kRows = 64, kIn = 16, kWidth = 48, kOut = 4;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    first = register_module("first", torch::nn::Linear(kIn, kWidth));
    for (int i = 0; i < 4; ++i) {
      blocks->push_back(torch::nn::Linear(kWidth, kWidth));
    }
    register_module("blocks", blocks);
    last = register_module("last", torch::nn::Linear(kWidth, kOut));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    for (const auto& block : *blocks) x = x + block->as<torch::nn::Linear>()->forward(x.relu());
    return last(x);
  }

  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Mlp);

// The same batch for every number of processes; each takes its rows.
torch::Tensor my_rows(const torch::Tensor& batch, const c10d::ProcessGroup& group) {
  return batch.chunk(group.getSize())[group.getRank()];
}

torch::Tensor batch_of(int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + step);
  return torch::randn({kRows, kIn}, generator);
}

torch::Tensor target_of(const torch::Tensor& x) {
  return torch::stack({x.slice(1, 0, 4).sum(1).tanh(), x.slice(1, 4, 8).sum(1).sin(),
                       x.slice(1, 8, 12).norm(2, 1), x.slice(1, 12, 16).amax(1)},
                      1);
}

double sum_over_ranks(c10d::ProcessGroup& group, double value) {
  std::vector<torch::Tensor> sum{torch::full({1}, value, torch::kDouble)};
  group.getDefaultBackend()->allreduce(sum)->wait();
  return sum[0].item<double>();
}

bool is_hidden(const std::string& name, const torch::Tensor& parameter) {
  return name.starts_with("blocks.") && parameter.dim() == 2;
}

void train(int steps, const char* checkpoint) {
  auto group = example::make_mpi_group();
  const bool speaks = group->getRank() == 0;
  torch::manual_seed(0);  // rank 0's weights count, and these are the same
  Mlp model;
  dmuon::DistributedMuon trainer(model.ptr(), dmuon::split_of(group), is_hidden,
                                 {.lr = 0.01, .adamw_lr = 3e-3});
  for (int step = 0; step < steps; ++step) {
    const auto batch = batch_of(step);
    trainer.zero_grad();
    const auto output = trainer.forward([&] { return model(my_rows(batch, *group)); });
    auto loss = torch::mse_loss(output, my_rows(target_of(batch), *group));
    loss.backward();
    trainer.clip_grad_norm(1.0);
    trainer.step();
    const double mean = sum_over_ranks(*group, loss.item<double>()) / group->getSize();
    if (speaks && (step % 10 == 0 || step + 1 == steps))
      std::printf("step %3d  loss %.6f\n", step, mean);
  }
  const double calls = sum_over_ranks(*group, static_cast<double>(trainer.ns_calls()));
  if (speaks) {
    std::printf("%d process(es): %.0f Newton-Schulz runs for %zu matrices and %d steps\n",
                group->getSize(), calls, trainer.owners().size(), steps);
    for (const auto& [name, owner] : trainer.owners()) {
      std::printf("  %s on rank %d\n", name.c_str(), owner);
    }
  }
  if (checkpoint) trainer.save(checkpoint);
}

}  // namespace

int main(int argc, char** argv) {
  const example::MpiSession mpi(argc, argv);
  try {
    train(argc > 1 ? std::atoi(argv[1]) : 60, argc > 2 ? argv[2] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

"""What torchtitan_dmuon.py leaves to the reader: torchtitan's llama3 debug model, its batches, a look at the losses.

The names of its feed-forward have "proj" in them, which the listing's predicate looks for; all else is torchtitan's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "torchtitan"))

import here
import on_cpu
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

STEPS, ROWS, LENGTH = 4, 16, 64


@dataclass
class Config:
    """Of torchtitan's Trainer, with two learning rates."""

    titan: object
    lr: float = 0.02
    adamw_lr: float = 1e-3


def llama3() -> Config:
    titan = here.llama3(layers=2, parallelism={"spmd_backend": "partial_dtensor"})
    for layer in titan.model_spec.model.layers:
        mlp = layer.feed_forward
        layer.feed_forward = MLP.Config(gate_proj=mlp.w1, down_proj=mlp.w2, up_proj=mlp.w3)
    for _, linear, _, _ in titan.model_spec.model.traverse(Linear.Config):
        linear.param_init = {"weight": attentive}
    return Config(titan)


def attentive(weight: torch.Tensor) -> None:
    """Attention that is not uniform: gradients of full rank, of which Newton-Schulz keeps the digits."""
    nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)


class MLP(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        gate_proj: Linear.Config
        up_proj: Linear.Config
        down_proj: Linear.Config

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = config.gate_proj.build()
        self.up_proj = config.up_proj.build()
        self.down_proj = config.down_proj.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class WithLoss(nn.Module):
    """Of a batch: the loss in nats of its tokens, over the tokens of all ranks, since torchtitan sums gradients."""

    def __init__(self, llama: nn.Module, ranks: int):
        super().__init__()
        self.llama, self.ranks = llama, ranks

    def forward(self, batch: tuple) -> torch.Tensor:
        given, labels = batch
        return (
            F.cross_entropy(self.llama(given["input"]).flatten(0, 1), labels.flatten()) / self.ranks
        )


def build_model(config: Config, ranks: int | None = None) -> WithLoss:
    """The same random weights wherever it is made."""
    torch.manual_seed(0)
    llama = config.titan.model_spec.model.build()
    llama.init_weights(buffer_device=None)
    return WithLoss(llama, ranks or dist.get_world_size())


def parallelize_model(model: WithLoss, mesh, config: Config) -> None:
    """torchtitan's, with its own meshes over the same ranks."""
    titan = config.titan
    titan.model_spec.parallelize_fn(
        model.llama,
        parallel_dims=ParallelDims.from_config(titan.parallelism, dist.get_world_size()),
        training=titan.training,
        parallelism=titan.parallelism,
        compile_config=titan.compile,
        ac_config=titan.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if on_cpu.ON_CPU and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no factor


def batches(rank: int, ranks: int):
    """`STEPS` of that rank's; all ranks' together are the same for any number of them."""
    data = here.Sequences(
        here.Sequences.Config(),
        dp_rank=0,
        dp_world_size=1,
        seq_len=LENGTH,
        local_batch_size=2 * ROWS,
    )
    for step in range(STEPS):
        given, labels = data.batch(step)
        yield {"input": given["input"].chunk(ranks)[rank]}, labels.chunk(ranks)[rank]


class Watched:
    """Batches; after each one's turn the loss of all ranks, which `loss()` is this one's part of, is printed."""

    def __init__(self, batches, loss):
        self._batches, self._loss, self.losses = batches, loss, []

    def __iter__(self):
        for batch in self._batches:
            yield batch
            whole = self._loss().detach().double().clone()
            dist.all_reduce(whole)
            self.losses.append(whole.item())
            if dist.get_rank() == 0:
                print(f"batch {len(self.losses)}: loss {whole.item():.6f}", flush=True)

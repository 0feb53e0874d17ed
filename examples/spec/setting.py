"""What the listings leave to the reader: a tiny model, its batches, and a look at the losses.

Whatever the number of processes, a step trains on the same `SEQUENCES` sequences, so that all print the same losses.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import dmuon
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, DIM, HEAD, HIDDEN = 48, 16, 4, 24
SEQUENCES, LENGTH = 96, 8


class Attention(nn.Module):
    """Has as many heads as its projections have outputs: all, or a tensor-parallel rank's share."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = linear(DIM, HIDDEN), linear(DIM, HIDDEN)
        self.down_proj = linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.self_attn = nn.RMSNorm(DIM), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(DIM), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Output(NamedTuple):  # FSDP2 finds the tensors in a tuple, and in no other object
    loss: Tensor


class MyModel(nn.Module):
    """A Llama of two layers. ``model(tokens).loss`` is the mean loss in nats of each next token.

    The same random weights wherever it is made.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Output:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return Output(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def predicate(name: str, parameter: Tensor) -> bool:
    return "proj" in name and parameter.ndim == 2


def plan() -> dict:
    """For ``parallelize_module`` of the whole model."""
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    return {f"layers.*.{name}": ColwiseParallel() for name in columns} | {
        f"layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")
    }


def hsdp(mesh: DeviceMesh) -> tuple[nn.Module, dmuon.Muon]:
    """A model on a mesh of replicate and shard, with updates that travel beside the next forward."""
    model = MyModel()
    dmuon.dedicate_params(model, mesh["shard"], predicate, replicate_mesh=mesh["replicate"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """A model on a mesh of dp and tp."""
    model = parallelize_module(MyModel(), mesh["tp"], plan())
    dmuon.dedicate_params(model, mesh["dp"], predicate)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def ddp_tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """A replicated model on a mesh of dp and tp, the latter of any size."""
    model = parallelize_module(MyModel(), mesh["tp"], plan())
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], predicate)
    return dmuon.replicate_tp(model, mesh["dp"])


def tiny_llama() -> str:
    """Where a tiny random Llama has been saved, for ``from_pretrained``. Call it before there is a process group, in
    which only the first rank would save."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=DIM // HEAD,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="tiny-llama-")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def batches(share: int, shares: int, steps: Iterable[int], parts: int = 1) -> Iterator[Tensor]:
    """Tokens of one of the data-parallel ranks: a batch of each step, or that cut in `parts`."""
    for step in steps:
        tokens = torch.randint(
            VOCABULARY, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step)
        )
        for _ in range(LENGTH):  # each token says which one is next
            tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 7) % VOCABULARY], dim=1)
        yield from tokens.chunk(shares)[share].chunk(parts)


def ranks_over(others: int) -> int:
    """The size of the mesh's dim that takes what processes the ``others`` leave."""
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks < others or ranks % others:
        raise SystemExit(
            f"{sys.argv[0]}: WORLD_SIZE is {ranks}, and the other dims of its mesh take {others}: give torchrun "
            f"--nproc-per-node {others}, or a multiple of it. Its first lines have the command."
        )
    return ranks // others


def share_of(mesh: DeviceMesh) -> tuple[int, int]:
    """Of a mesh of data-parallel axes: which share of a batch is this rank's, of how many."""
    ranks = mesh.mesh.flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)


class Watched:
    """Batches for a loop. After each one's turn the mean over the ranks of `loss()` is printed, and kept in `losses`."""

    def __init__(self, batches: Iterable, loss: Callable[[], Tensor]):
        self._batches, self._loss, self.losses = batches, loss, []

    def __iter__(self) -> Iterator:
        for batch in self._batches:
            yield batch
            self.losses.append(mean_over_ranks(self._loss()))
            show(f"batch {len(self.losses)}: loss {self.losses[-1]:.6f}")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]
) -> list[float]:
    """The losses, before each step."""
    watched = Watched(batches, lambda: loss)
    for batch in watched:
        optimizer.zero_grad()
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
    return watched.losses


def mean_over_ranks(value: Tensor) -> float:
    mean = value.detach().double().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def show(text: str) -> None:
    """Prints once."""
    if dist.get_rank() == 0:
        print(text, flush=True)

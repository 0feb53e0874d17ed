"""Jobs with more than one axis, and the model of ``parity`` trained in them.

Every grid sums the same four slices of a batch, so that one process can be the reference of all.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import dmuon
import parity
import torch
import torch.distributed as dist
from models import Gpt, is_block_matrix
from support import run_ranks, shard
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = max(parity.LIMITS)
SLICES = range(parity.WORLD_SIZE)


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes. Global ranks count through tp first, then shard, then replicate."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    def __str__(self) -> str:
        kinds = {"FSDP": self.shard > 1, "HSDP": self.replicate > 1, "TP": self.tp > 1}
        kinds["FSDP"] &= self.replicate == 1
        sizes = [str(size) for name, size in vars(self).items() if size > 1]
        return " ".join(("+".join(kind for kind, used in kinds.items() if used), "x".join(sizes)))

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tp

    def mesh(self) -> DeviceMesh:
        return _mesh(tuple(vars(self).items()))

    def slices(self) -> list[int]:
        """Which of a batch this rank trains on; its tensor-parallel peers train on the same."""
        data_rank, data_ranks = dist.get_rank() // self.tp, self.replicate * self.shard
        return [s for s in SLICES if s * data_ranks // len(SLICES) == data_rank]


# Of a process: the groups of an axis are kept from one model to the next.
@functools.cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*axes)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def distribute(
    model: Gpt, grid: Grid, dedicated: bool = True, ignored: bool = False, **options
) -> None:
    """As a script does it: cut over tp, dedicate, shard.

    Args:
        ignored: nobody moves the block matrices, as if there were none.
        options: of ``dedicate_params``.
    """
    mesh = grid.mesh()
    for unit in model.units if grid.tp > 1 else ():
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(
            unit, mesh["tp"], plan | {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    if dedicated:
        replicas = mesh["replicate"] if grid.replicate > 1 else None
        dmuon.dedicate_params(
            model, mesh["shard"], is_block_matrix, replicate_mesh=replicas, **options
        )
    matrices = {p for n, p in model.named_parameters() if is_block_matrix(n, p)}
    over = mesh["replicate", "shard"] if grid.replicate > 1 else mesh["shard"]
    shard(model, model.units, over, **({"ignored_params": matrices} if ignored else {}))


def build(grid: Grid, dedicate: dict | None = None, **muon) -> tuple[Gpt, dmuon.Muon]:
    model = parity.initial_model()
    distribute(model, grid, **(dedicate or {}))
    adamw = {f"adamw_{key}": value for key, value in parity.ADAMW.items()}
    settings = {"lr": parity.LR, "momentum": parity.MOMENTUM, "weight_decay": parity.DECAY}
    return model, dmuon.Muon(model, **settings, **adamw, **muon)


def train(model: Gpt, optimizer, grid: Grid, after: Callable[[int], None] = lambda step: None):
    """``STEPS`` steps; ``after(step)`` follows each."""
    for step in range(1, STEPS + 1):
        train_step(model, optimizer, grid, step)
        after(step)


def train_step(model: Gpt, optimizer, grid: Grid, step: int) -> None:
    parts = [parity.slice_of_batch(step, s) for s in grid.slices()]
    tokens, targets = (torch.cat(part) for part in zip(*parts))
    model(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_weights(model: Gpt) -> dict[str, Tensor]:
    """On rank 0; collective."""
    return dmuon.get_model_state_dict(model)


@functools.cache
def one_process() -> tuple[dict, float]:
    """The weights that one process ends with, as numpy arrays, and how far they move when it adds the
    slices in another order."""
    return run_ranks(_one_process, 1)[0]


def _one_process() -> tuple[dict, float]:
    orders = (0, 1, 2, 3), (2, 0, 3, 1)
    some, other = (parity.train_single(torch.float32, "gram", o)[STEPS] for o in orders)
    return {name: weight.numpy() for name, weight in some.items()}, parity.difference(other, some)


def tolerance() -> float:
    return max(parity.LIMITS[STEPS], 2 * one_process()[1])


def error(weights: dict[str, Tensor]) -> float:
    """Of what a grid has trained, against one process."""
    single = {name: torch.from_numpy(weight) for name, weight in one_process()[0].items()}
    return parity.difference(weights, single)

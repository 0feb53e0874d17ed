"""Plans of models that are not there, on a topology from a line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dmuon import _C
from dmuon.errors import nearest, summarised
from dmuon.names import matches
from dmuon.shapes import Shape

AXES = ("replicate", "shard", "tp")
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
MOST_RANKS = 1_000_000  # a plan has numbers of each


def read_topology(text: str) -> dict[str, int]:
    """``"replicate=8 shard=16 tp=8"``; an axis that is left out has one rank.

    Raises:
        ValueError: an unknown axis, one that is named twice, a size that is no whole number of at least 1, more than
            a million ranks.
    """
    sizes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        axis, _, size = part.partition("=")
        if axis not in AXES:
            raise ValueError(f"the topology {text!r} has {axis!r}, {nearest(axis, AXES)}")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"the topology {text!r}: {axis} is {size!r}; it must be a whole number of at least 1."
            )
        if axis in sizes:
            raise ValueError(f"the topology {text!r} names {axis} twice.")
        sizes[axis] = int(size)
    if (ranks := math.prod(sizes.values())) > MOST_RANKS:
        raise ValueError(
            f"the topology {text!r} has {ranks} ranks; at most {MOST_RANKS} are planned."
        )
    return dict.fromkeys(AXES, 1) | sizes


def check_ranks(topology: Mapping[str, int], ranks: int | None) -> None:
    """Raises ValueError where the axes do not multiply out."""
    product = math.prod(topology.values())
    if ranks is not None and ranks != product:
        axes = " x ".join(f"{axis} {size}" for axis, size in topology.items())
        raise ValueError(f"{axes} are {product} ranks, and --ranks is {ranks}. Change one of them.")


def choose(shapes: list[Shape], include: list[str], exclude: list[str]) -> list[Shape]:
    """Matrices that a predicate would choose: by globs of name or module path, or those of repeated blocks.

    Raises:
        ValueError: nothing is chosen; what there is.
    """
    matrices = [s for s in shapes if len(s.size) >= 2]
    if include:
        chosen = [s for s in matrices if matches(s.name, include)]
    else:
        chosen = [s for s in matrices if s.layer]
    chosen = [s for s in chosen if not matches(s.name, exclude)]
    if not chosen:
        names = summarised([s.name for s in matrices])
        if not names:
            raise ValueError(f"none of the {len(shapes)} parameters has two dims or more.")
        raise ValueError(f"nothing is chosen. Matrices are {names}. Choose with --include.")
    return chosen


@dataclass(frozen=True)
class Planned:
    """A plan with the shapes and the topology it was made for."""

    plan: "_C.OwnershipPlan"
    topology: dict[str, int]
    dtype: str
    total_parameters: int

    @property
    def elements(self) -> int:
        return sum(m.batch * m.rows * m.cols for m in self.plan.matrices)

    def as_dict(self) -> dict:
        """For programs. FLOPs are of one step's Newton-Schulz, bytes of the whole job and step."""
        plan, report = self.plan, self.plan.report
        return {
            "topology": self.topology,
            "ranks": math.prod(self.topology.values()),
            "parameters": self.total_parameters,
            "dedicated": self.elements,
            "matrices": len(plan.matrices),
            "units": len(plan.units),
            "max_load_flops": report.max_load,
            "mean_load_flops": report.mean_load,
            "load_max_over_mean": report.max_load / (report.mean_load or 1),
            "load_max_over_bound": report.max_load / (report.lower_bound or 1),
            "w_star": report.w_star,
            "max_state_bytes": report.max_state_bytes,
            "bytes_per_step": self.bytes_per_step(),
            "owners": dict(zip((m.name for m in plan.matrices), self.owners())),
            "loads": plan.loads(),
            "state_bytes": plan.state_bytes(),
            "digest": plan.digest(),
        }

    def owners(self) -> list[int]:
        """Ranks, by matrix: replicate is the outermost axis, tp the innermost."""
        tp = self.topology["tp"]
        return [cell * tp + at for cell, at in zip(self.plan.owners, self.plan.tp_owners)]

    def bytes_per_step(self) -> dict[str, int]:
        """By channel. Weights travel in the training's dtype, gradients and updates in float32; weights are fetched
        for forward and again for backward."""
        replicate, shard, tp = (self.topology[axis] for axis in AXES)
        weights, sums = self.elements * _ITEM[self.dtype], self.elements * 4
        within, across = replicate * (shard - 1), replicate - 1
        away = sums * (tp - 1) // tp
        moved = {
            "materialise": 2 * within * weights,
            "reduce": within * sums,
            "replicate_reduce": across * sums,
            "publish": across * weights,
            "tp_gather": away,
            "tp_scatter": away,
        }
        return {channel: count for channel, count in moved.items() if count}


def plan(
    shapes: list[Shape],
    chosen: list[Shape],
    topology: dict[str, int],
    dtype: str = "bfloat16",
    memory_limit_bytes: int = 0,
    max_owners_per_group: int = 0,
) -> Planned:
    """Raises ValueError where no assignment keeps the memory limit."""
    policy = _C.PlanPolicy()
    policy.memory_limit_bytes, policy.max_owners_per_group = (
        memory_limit_bytes,
        max_owners_per_group,
    )
    matrices = [_matrix(s, dtype, topology["tp"]) for s in chosen]
    made = _C.make_plan(matrices=matrices, policy=policy, **topology)
    return Planned(made, topology, dtype, sum(math.prod(s.size) for s in shapes))


def _matrix(shape: Shape, dtype: str, tp: int) -> "_C.Matrix":
    """Of more than two dims a batch of matrices. Cut evenly over the TP ranks."""
    matrix = _C.Matrix()
    *leading, matrix.rows, matrix.cols = shape.size
    matrix.name, matrix.batch, matrix.dtype = shape.name, math.prod(leading), dtype
    matrix.layer, matrix.unit = shape.layer, shape.layer or "root"
    numel = math.prod(shape.size)
    held = 4 + (0 if dtype == "float32" else _ITEM[dtype])  # master, and the copy that computes
    matrix.state_bytes, matrix.shard_bytes = 4 * numel, held * -(-numel // tp)
    return matrix

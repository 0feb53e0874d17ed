"""Plans of models that are not there: shapes from a file, a topology from a line."""

import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dmuon import _C
from dmuon.errors import listed, nearest
from dmuon.names import matches

AXES = ("replicate", "shard", "tp")
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAFETENSORS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NUMBERED = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Shape:
    """A parameter that nobody has allocated."""

    name: str
    size: tuple[int, ...]

    @property
    def layer(self) -> str:
        """Its repeated block: the path up to the first number. Empty where it has none."""
        found = _NUMBERED.match(self.name)
        return found[1] if found else ""


def read_topology(text: str) -> dict[str, int]:
    """``"replicate=8 shard=16 tp=8"``; an axis that is left out has one rank.

    Raises:
        ValueError: an unknown axis, or a size that is no whole number of at least 1.
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.replace(",", " ").split():
        axis, _, size = part.partition("=")
        if axis not in AXES:
            raise ValueError(f"the topology {text!r} has {axis!r}, {nearest(axis, AXES)}")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"the topology {text!r}: {axis} is {size!r}; it must be a whole number of at least 1."
            )
        sizes[axis] = int(size)
    return sizes


def check_ranks(topology: Mapping[str, int], ranks: int | None) -> None:
    """Raises ValueError where the axes do not multiply out."""
    product = math.prod(topology.values())
    if ranks is not None and ranks != product:
        axes = " x ".join(f"{axis} {size}" for axis, size in topology.items())
        raise ValueError(f"{axes} are {product} ranks, and --ranks is {ranks}. Change one of them.")


def read_shapes(source: str) -> list[Shape]:
    """Parameters of a Hugging Face ``config.json``, a ``.safetensors`` file, a directory that holds either, or of the
    model that ``module:function`` makes, on the meta device.

    Raises:
        ValueError: none of these; a package that is needed is missing.
    """
    path = Path(source)
    if path.is_dir():
        return _of_directory(path)
    if path.suffix == ".safetensors":
        return _of_safetensors([path])
    if path.name.endswith(".json") and path.exists():
        return _of_config(path)
    if ":" in source and not path.exists():
        return _of_function(source)
    raise ValueError(
        f"{source!r} is no model that dmuon can read. Give a Hugging Face config.json, a .safetensors file, a "
        "directory that holds either, or module:function."
    )


def _of_directory(path: Path) -> list[Shape]:
    if (path / "config.json").exists():
        return _of_config(path / "config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has neither a config.json nor .safetensors files.")
    return _of_safetensors(files)


def _of_safetensors(files: Iterable[Path]) -> list[Shape]:
    """Of their headers: eight bytes of length, then JSON."""
    shapes = []
    for path in files:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes += [
            Shape(name, tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] in _SAFETENSORS
        ]
    return shapes


def _of_config(path: Path) -> list[Shape]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package transformers: pip install transformers."
        ) from error
    config = AutoConfig.from_pretrained(path)
    return _on_meta(lambda: AutoModelForCausalLM.from_config(config))


def _of_function(source: str) -> list[Shape]:
    module, _, name = source.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{source!r} cannot be imported: {error}.") from error
    return _on_meta(function)


def _on_meta(make: Callable) -> list[Shape]:
    import torch

    with torch.device("meta"):
        model = make()
    return [Shape(name, tuple(p.shape)) for name, p in model.named_parameters()]


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
        raise ValueError(f"nothing is chosen. Matrices are {listed([s.name for s in matrices])}.")
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
            "owners": {m.name: self.owner(i) for i, m in enumerate(plan.matrices)},
            "loads": plan.loads(),
            "state_bytes": plan.state_bytes(),
            "digest": plan.digest(),
        }

    def owner(self, matrix: int) -> int:
        """The rank: replicate the outermost axis, tp the innermost."""
        return self.plan.owners[matrix] * self.topology["tp"] + self.plan.tp_owners[matrix]

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

"""What one rank wants to dedicate, checked. Nothing is changed here and nothing communicated."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon.axes import Axes
from dmuon.boundaries import Boundaries, containers
from dmuon.errors import listed, summarised
from dmuon.names import slots
from dmuon.policy import ParamPolicy, PolicyTable, matrix_view
from dmuon.tensor_parallel import Layout, layout_of, local_part, overlaps_itself


@dataclass
class Chosen:
    """One dedicated parameter and every slot that holds it."""

    name: str
    parameter: nn.Parameter
    policy: ParamPolicy
    view: tuple[int, int, int]
    boundaries: list[str]  # of each name; the first is its unit's
    layout: Layout  # on the TP ranks
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return self.boundaries[0]


def collect(
    model: nn.Module,
    axes: Axes,
    predicate: Callable[[str, nn.Parameter], bool],
    policies: PolicyTable,
    boundaries: Boundaries,
) -> list[Chosen]:
    """The chosen parameters, sorted by name.

    Raises:
        ValueError: naming the parameter and what is wrong with it.
    """
    found = _select(model, predicate)
    chosen = [
        _choose(names, axes, policies, boundaries)
        for names in found
        if policies.of(names[0][0]).route != "sharded_adamw"
    ]
    policies.check_all_matched()
    _check_units(chosen)
    return sorted(chosen, key=lambda c: c.name)


def _select(model, predicate) -> list[list[tuple]]:
    """Per chosen parameter its slots, sorted by name."""
    by_parameter: dict[int, list[tuple]] = {}
    for slot in slots(model):
        by_parameter.setdefault(id(slot[3]), []).append(slot)
    selected = []
    for group in by_parameter.values():
        verdicts = {slot[0]: bool(predicate(slot[0], slot[3])) for slot in group}
        if any(verdicts.values()) and not all(verdicts.values()):
            yes = [name for name, chosen in verdicts.items() if chosen]
            no = [name for name, chosen in verdicts.items() if not chosen]
            raise ValueError(
                f"{listed(yes)} and {listed(no)} are one tied weight, and the predicate chooses only "
                "the former. Choose all names of a tied weight, or none."
            )
        if all(verdicts.values()):
            selected.append(sorted(group, key=lambda slot: slot[0]))
    return selected


def _places(names: list[tuple]) -> list[tuple[nn.Module, str]]:
    """A module that has two names is one place."""
    return list(
        {(id(module), attribute): (module, attribute) for _, module, attribute, _ in names}.values()
    )


def nothing_selected(model: nn.Module) -> str:
    names = [name for name, _, _, parameter in slots(model) if parameter.ndim >= 2]
    if not names:
        return (
            "the predicate selects no parameter, and none of this model's has two dims or more. Pass "
            "allow_empty=True if that is meant."
        )
    return (
        "the predicate selects no parameter. The model's parameters with two dims or more are "
        f"{summarised(names)}. Correct the predicate, or pass allow_empty=True."
    )


def _choose(names, axes, policies, boundaries) -> Chosen:
    name, module, _, parameter = names[0]
    policy = policies.of(name)
    _check_parameter(name, module, parameter)
    _check_policy(name, policy)
    return Chosen(
        name=name,
        parameter=parameter,
        policy=policy,
        view=_view(name, module, parameter, policy),
        boundaries=[boundaries.of(fqn, parameter) for fqn, *_ in names],
        slots=_places(names),
        names=[slot[0] for slot in names],
        layout=layout_of(name, parameter, axes.dp_names),
    )


def _view(name, module, parameter, policy) -> tuple[int, int, int]:
    if policy.route == "adamw":  # elementwise: any shape will do
        return 1, 1, parameter.numel()
    return matrix_view(name, module, parameter.shape, policy.view)


def _check_policy(name: str, policy: ParamPolicy) -> None:
    for key in ("master_dtype", "optim_dtype"):
        if getattr(policy, key) not in (None, torch.float32):
            raise ValueError(
                f"parameter {name!r} has {key}={getattr(policy, key)}; masters and momenta are "
                "float32 (float64 masters for float64 parameters). Leave it out."
            )


def _check_parameter(name: str, module: nn.Module, parameter: nn.Parameter) -> None:
    if hasattr(parameter, "_dedicated_owner_rank"):
        raise ValueError(f"parameter {name!r} is dedicated already. Call dedicate_params once.")
    if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter {name!r} is lazy. Run one forward first, to give it a shape.")
    if not isinstance(parameter, DTensor) and type(parameter) is not nn.Parameter:
        raise ValueError(
            f"parameter {name!r} is a {type(parameter).__name__}, a tensor subclass, whose memory "
            "dmuon cannot move. Leave it out of the predicate."
        )
    if getattr(module, "sparse", False):
        raise ValueError(
            f"parameter {name!r} belongs to a {type(module).__name__} with sparse=True; a sparse gradient "
            "is no matrix. Set sparse=False, or leave it out of the predicate."
        )
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ValueError(f"parameter {name!r} is {parameter.dtype}; it must be floating point.")
    if overlaps_itself(local_part(parameter)):
        raise ValueError(
            f"parameter {name!r} is expanded: several of its elements are one in memory. Make it "
            "contiguous first."
        )


_OF_A_UNIT = ("param_dtype", "grad_dtype", "output_dtype", "cast_forward_inputs")


def _check_units(chosen: list[Chosen]) -> None:
    """One flat buffer holds one dtype, on one device; one reduction has one dtype."""
    first: dict[str, Chosen] = {}
    for c in chosen:
        other = first.setdefault(c.unit, c)
        for key in ("dtype", "device"):
            _check_same(other, c, key, getattr(other.parameter, key), getattr(c.parameter, key))
        for key in _OF_A_UNIT:
            _check_same(other, c, key, getattr(other.policy, key), getattr(c.policy, key))


def _check_same(one: Chosen, other: Chosen, key: str, a, b) -> None:
    if a != b:
        raise ValueError(
            f"parameters {one.name!r} ({a}) and {other.name!r} ({b}) are in one unit, "
            f"{one.unit or 'the whole model'!r}, and differ in {key}. Give them one {key}, or set them "
            "apart with hook_boundary_resolver."
        )


def _held_bytes(c: Chosen, tp: int) -> tuple[int, int]:
    """Of the TP owner, and of every rank of its TP group: momentum, and master with its copy in the
    dtype that computes."""
    computes = c.policy.param_dtype or c.parameter.dtype
    weight = 4 + (0 if computes == torch.float32 else computes.itemsize)
    shape = c.parameter.shape
    largest = max(c.layout.numel_on(shape, rank) for rank in range(tp))
    if c.policy.route == "adamw":
        return 0, largest * (weight + 8)
    return shape.numel() * 4, largest * weight


def as_matrices(model: nn.Module, chosen: list[Chosen], tp: int) -> list["_C.Matrix"]:
    """What the planner sees of them."""
    repeated = containers(model)
    matrices = []
    for c in chosen:
        matrix = _C.Matrix()
        matrix.name, matrix.unit = c.name, c.unit or "root"
        matrix.layer = _C.layer_of(c.name, repeated)
        matrix.batch, matrix.rows, matrix.cols = c.view
        matrix.route = getattr(_C.Route, c.policy.route)
        matrix.dtype = str(c.parameter.dtype).removeprefix("torch.")
        matrix.state_bytes, matrix.shard_bytes = _held_bytes(c, tp)
        matrices.append(matrix)
    return matrices


def warn_unusual(model: nn.Module, chosen: list[Chosen]) -> None:
    """Embeddings and output heads: Muon is not meant for them, though it runs."""
    repeated = containers(model)
    vocabularies = {
        (m.num_embeddings, m.embedding_dim) for m in model.modules() if isinstance(m, nn.Embedding)
    }
    unusual = [
        c.name
        for c in chosen
        if not _C.layer_of(c.name, repeated)
        and (isinstance(c.slots[0][0], nn.Embedding) or tuple(c.parameter.shape) in vocabularies)
    ]
    if unusual:
        warnings.warn(
            f"embeddings or output heads are dedicated: {listed(unusual)}. Their rows are looked up one "
            "by one; AdamW usually trains them better. Leave them out of the predicate, or ignore this.",
            stacklevel=3,
        )

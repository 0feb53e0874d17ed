"""``dedicate_params``: the setup of FSDP2 training."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon import _C, checkpoint, fsdp2
from dmuon.agreement import raise_everywhere
from dmuon.axes import Axes, check_mesh, find_axes, with_ranks
from dmuon.boundaries import Boundaries
from dmuon.collect import Chosen, as_matrices, collect, nothing_selected, warn_unusual
from dmuon.errors import choice
from dmuon.groups import channel_groups, control_group
from dmuon.hooks import Boundary
from dmuon.names import clean
from dmuon.policy import PolicyTable
from dmuon.runtime import Runtime, register, runtime_of

Predicate = Callable[[str, nn.Parameter], bool]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate,
    *,
    replicate_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    hook_boundary_predicate: Callable[[str, nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    hook_boundary_resolver: Callable | None = None,
    param_policy: Mapping | None = None,
    compute_dtype: torch.dtype | None = None,
    tp_buffer_reuse: bool | str = False,
    process_group_policy: str = "isolated",
    owner_strategy: str = "lpt",
    owner_cost_model: str = "optimizer",
    max_owners_per_group: int | None = None,
    pack_small_params: bool = True,
    memory_limit_bytes: int | None = None,
    independent_dims: Sequence[str] = (),
    strict_init: bool = False,
    allow_empty: bool = False,
) -> Mapping[str, int]:
    """Give each chosen weight matrix one owner rank. Call it before ``fully_shard``.

    The chosen parameters leave this rank's memory unless it owns them; between uses they show NaN.
    ``fully_shard`` skips them, ``dmuon.Muon`` trains them. Initial values are the owner's.

    A weight that ``parallelize_module`` has made a DTensor stays one: its TP axis is found from it. Its
    gradient is gathered on one rank of the owner's TP group, the TP owner, which runs Newton-Schulz.

    Collective over the job, all axes: every rank calls it, with the same model and arguments.

    Args:
        model: on the mesh's device, or on the meta device (then initialise it before the first
            forward: ``to_empty`` and your initialisation).
        mesh: 1-D, the data-parallel slice over which ``fully_shard`` shards. Named, where parameters are
            DTensors.
        predicate: ``(name, parameter) -> bool``; the same answer on every rank.
        replicate_mesh: 1-D, the replicate slice of hybrid sharding. An owner is one coordinate of both.
        reshard_after_forward: free the whole weights after forward and fetch them again for backward
            (3 units of (N-1)P bytes on the wire per step), or keep them until then (2 units).
        hook_boundary_predicate: ``(path, module) -> bool``: the innermost accepted ancestor of a
            parameter is the module whose call makes it whole. Default: its transformer block.
        hook_boundary_strict: a parameter without an accepted ancestor is an error.
        hook_boundary_resolver: ``(name, parameter) -> module or path``, instead of both.
        param_policy: ``{"defaults": {...}, "overrides": [{"name": substring or list, "set": {...}}]}``
            with ``route``, ``view``, ``param_dtype``, ``grad_dtype``, ``output_dtype``,
            ``cast_forward_inputs``; later overrides win.
        compute_dtype: the default ``param_dtype``; otherwise that of the enclosing unit's
            ``MixedPrecisionPolicy``, otherwise the parameter's own.
        tp_buffer_reuse: tensor parallelism: units take turns with one buffer, of the size of the largest,
            for the messages of gradients (``"gather"``), of updates (``"scatter"``), or both (``"all"``,
            True). Bits do not depend on it. It costs overlap.
        process_group_policy: ``"isolated"``: process groups of dmuon's own, so that its traffic runs
            beside the runtime's. ``"shared"``: the mesh's group, one operation after the other, for
            debugging; then every rank must use the same parts of the model in the same order.
        owner_strategy: ``"lpt"`` balances; ``"round_robin"`` counts through the names.
        owner_cost_model: what is balanced: ``"optimizer"`` (FLOPs of Newton-Schulz) or ``"numel"``.
        max_owners_per_group: at most this many owners within one unit.
        pack_small_params: matrices of one unit and owner travel as one message.
        memory_limit_bytes: of weight and state on one owner; an error where no assignment keeps it.
        independent_dims: dims of the mesh whose ranks train other weights (pipeline stages): the job is
            what is left.
        strict_init: initial values that differ between ranks are an error; otherwise the owner's count.
        allow_empty: a predicate that selects nothing is not an error.

    Returns:
        A read-only mapping from parameter name to owner rank (the TP owner's), as ``dist.get_rank()``
        counts.

    Raises:
        ValueError: with the same text on every rank, before anything has changed: the ranks choose
            different parameters, a parameter cannot be dedicated, the order of calls is wrong.
    """
    check_mesh(mesh)
    if replicate_mesh is not None:
        check_mesh(replicate_mesh, "replicate_mesh")
    try:
        _check_arguments(tp_buffer_reuse, process_group_policy)
        _check_model(model)
        axes = find_axes(model, mesh, replicate_mesh, tuple(independent_dims))
    except Exception as error:
        raise_everywhere(control_group(mesh, tuple(range(dist.get_world_size()))), error)
    control = control_group(mesh, axes.job)
    try:
        axes = with_ranks(axes, control)
        chosen = collect(
            model,
            axes,
            predicate,
            PolicyTable(param_policy, compute_dtype),
            Boundaries(
                model, hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver
            ),
        )
        if not chosen and not allow_empty:
            raise ValueError(nothing_selected(model))
        policy = _plan_policy(
            owner_strategy,
            owner_cost_model,
            max_owners_per_group,
            pack_small_params,
            memory_limit_bytes,
        )
        plan = _plan(model, chosen, axes, policy) if chosen else None
        lines = _proposal(
            chosen, plan, reshard_after_forward, process_group_policy, tp_buffer_reuse
        )
    except Exception as error:
        raise_everywhere(control, error)
    subject = {
        "subject": "dedicate the same parameters",
        "advice": "Make the predicate a function of name, shape and dtype only, and build the same model "
        "on every rank.",
    }
    _C.agree(control.group_name, lines, **subject)
    if strict_init:
        _C.agree(control.group_name, [_values(c) for c in chosen], **subject)
    if not chosen:
        return MappingProxyType({})
    warn_unusual(model, chosen)
    runtime = _install(model, axes, chosen, plan, control, process_group_policy, tp_buffer_reuse)
    for unit in range(len(plan.units)):
        runtime.adapter.unit(unit).reshard_after_forward = reshard_after_forward
    return MappingProxyType({name: p.owner_rank for p in runtime.params for name in p.names})


def _plan(model, chosen, axes: Axes, policy):
    shard, replicate, tp = axes.sizes
    matrices = as_matrices(model, chosen, tp)
    return _C.make_plan(matrices=matrices, shard=shard, replicate=replicate, tp=tp, policy=policy)


def _check_arguments(tp_buffer_reuse, process_group_policy) -> None:
    choice("tp_buffer_reuse", tp_buffer_reuse, (False, True, "gather", "scatter", "all"))
    choice("process_group_policy", process_group_policy, ("isolated", "shared"))


def _check_model(model) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if runtime_of(model, optional=True) is not None:
        raise ValueError("dedicate_params was called on this model already. Call it once.")
    sharded = [clean(path) for path, m in model.named_modules() if isinstance(m, fsdp2.FSDPModule)]
    if sharded:
        raise ValueError(
            f"module {sharded[0] or 'the model'!r} went through fully_shard already. Call "
            "dedicate_params before fully_shard."
        )


def _plan_policy(strategy, cost_model, max_owners, pack, memory_limit) -> "_C.PlanPolicy":
    choice("owner_strategy", strategy, ("lpt", "round_robin"))
    choice("owner_cost_model", cost_model, ("optimizer", "numel"))
    for name, value in (("max_owners_per_group", max_owners), ("memory_limit_bytes", memory_limit)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(
                f"{name} is {value!r}; it must be a whole number of at least 1, or None."
            )
    policy = _C.PlanPolicy()
    policy.strategy = getattr(_C.OwnerStrategy, strategy)
    policy.cost_model = getattr(_C.CostModel, cost_model)
    policy.max_owners_per_group = max_owners or 0
    policy.memory_limit_bytes = memory_limit or 0
    policy.pack = bool(pack)
    return policy


def _proposal(chosen: list[Chosen], plan, *settings) -> list[str]:
    """What must be equal on all ranks, one line per parameter."""
    lines = [
        f"{c.name}\t{tuple(c.parameter.shape)} {c.parameter.dtype} on {c.parameter.device.type}, "
        f"unit {c.unit or 'root'!r}, {c.policy}, tied {c.names}, {_placements(c.parameter)}"
        for c in chosen
    ]
    versions = f"dmuon {version('dmuon')}, torch {torch.__version__}"
    digest = plan.digest() if plan else ""
    return [*lines, f"the arguments of dedicate_params\tplan {digest}, {settings}, {versions}"]


def _placements(parameter: torch.Tensor) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "plain"


def _values(c: Chosen) -> str:
    """Collective over the TP ranks where the parameter is a DTensor."""
    whole = c.parameter.detach()
    return f"{c.name}\tvalues {_checksum(whole.full_tensor() if isinstance(whole, DTensor) else whole)}"


def _checksum(parameter: torch.Tensor) -> str:
    """Of the bytes; a parameter on the meta device has none."""
    if parameter.is_meta:
        return "meta"
    flat = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


def _install(
    model, axes: Axes, chosen, plan, control, process_group_policy, tp_buffer_reuse
) -> Runtime:
    runtime = Runtime(model, chosen, plan, axes)
    paths = list(dict.fromkeys(path for c in chosen for path in c.boundaries))
    unit_index = {unit.name: i for i, unit in enumerate(plan.units)}
    used = [
        sorted({unit_index[c.unit or "root"] for c in chosen if path in c.boundaries})
        for path in paths
    ]
    order = _registration_order(model, chosen, unit_index)
    device, device_type = chosen[0].parameter.device, axes.shard.device_type
    runtime.control = control
    runtime.adapter = _C.Fsdp2Adapter(len(plan.units), float(axes.dp_size))
    runtime.ring = _C.FlightRing()
    runtime.engine = _C.Engine(
        plan=plan,
        boundaries=used,
        encloses=[any(_inside(other, path) for other in paths) for path in paths],
        order=_C.from_rank_0(control.group_name, order[::-1]),
        adapter=runtime.adapter,
        ring=runtime.ring,
        groups=channel_groups(axes, control, process_group_policy),
        lane_kind=_lane_kind(device_type, process_group_policy),
        device=torch.device(device_type) if device.type == "meta" else device,
        position=axes.position,
        layouts=[c.layout.as_tuple(c.parameter.shape) for c in chosen],
        share_gather_staging=tp_buffer_reuse in (True, "all", "gather"),
        share_scatter_staging=tp_buffer_reuse in (True, "all", "scatter"),
    )
    runtime.adopt()
    modules = {clean(path): module for path, module in model.named_modules()}
    for index, path in enumerate(paths):
        units = {plan.units[u].name for u in used[index]}
        params = [p for p in runtime.params if p.unit in units]
        runtime.boundary_hooks.append(Boundary(runtime, index, path, modules[path], params))
    checkpoint.install_hooks(runtime)
    register(model, runtime)
    return runtime


def _inside(path: str, other: str) -> bool:
    return path != other and (other == "" or path.startswith(other + "."))


def _lane_kind(device_type: str, policy: str) -> "_C.LaneKind":
    if policy == "shared":
        return _C.LaneKind.inline_
    return _C.LaneKind.host if device_type == "cpu" else _C.LaneKind.device


def _registration_order(model, chosen, unit_index) -> list[int]:
    """Units as the model registers them, which is the order of most forwards."""
    by_name = {name: unit_index[c.unit or "root"] for c in chosen for name in c.names}
    names = (clean(name) for name, _ in model.named_parameters())
    return list(dict.fromkeys(by_name[name] for name in names if name in by_name))

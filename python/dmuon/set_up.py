"""What every runtime's ``dedicate_params`` does: choose, plan, agree, install."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon import _C, checkpoint, fsdp2, reads, replicas
from dmuon.agreement import raise_everywhere
from dmuon.axes import Axes, find_axes, with_ranks
from dmuon.boundaries import Boundaries
from dmuon.collect import Chosen, as_matrices, collect, nothing_selected, warn_unusual
from dmuon.errors import choice
from dmuon.groups import channel_groups, control_group
from dmuon.hooks import Boundary
from dmuon.names import clean
from dmuon.policy import PolicyTable
from dmuon.runtime import Runtime, register, runtime_of

Predicate = Callable[[str, nn.Parameter], bool]
_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)


@dataclass
class Settings:
    """The keywords that all runtimes share; ``dedicate_params`` documents them."""

    hook_boundary_predicate: Callable[[str, nn.Module], bool] | None = None
    hook_boundary_strict: bool = True
    hook_boundary_resolver: Callable | None = None
    param_policy: Mapping | None = None
    compute_dtype: torch.dtype | None = None
    tp_buffer_reuse: bool | str = False
    process_group_policy: str = "isolated"
    owner_strategy: str = "lpt"
    owner_cost_model: str = "optimizer"
    max_owners_per_group: int | None = None
    pack_small_params: bool = True
    memory_limit_bytes: int | None = None
    independent_dims: tuple[str, ...] = ()
    strict_init: bool = False
    allow_empty: bool = False

    def check(self) -> None:
        choice("tp_buffer_reuse", self.tp_buffer_reuse, (False, True, "gather", "scatter", "all"))
        choice("process_group_policy", self.process_group_policy, ("isolated", "shared"))
        choice("owner_strategy", self.owner_strategy, ("lpt", "round_robin"))
        choice("owner_cost_model", self.owner_cost_model, ("optimizer", "numel"))
        for name in ("max_owners_per_group", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value < 2**63):
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number of at least 1, or None."
                )

    def plan_policy(self) -> "_C.PlanPolicy":
        policy = _C.PlanPolicy()
        policy.strategy = getattr(_C.OwnerStrategy, self.owner_strategy)
        policy.cost_model = getattr(_C.CostModel, self.owner_cost_model)
        policy.max_owners_per_group = self.max_owners_per_group or 0
        policy.memory_limit_bytes = self.memory_limit_bytes or 0
        policy.pack = bool(self.pack_small_params)
        return policy


def set_up(
    model: nn.Module,
    shard: DeviceMesh | None,
    replicate: DeviceMesh | None,
    predicate: Predicate,
    settings: Settings,
    front,
    extra: tuple = (),
) -> Runtime | None:
    """The runtime of ``model``, installed and registered; None where nothing was chosen.

    Collective over the job.

    Args:
        front: the module or object of the runtime (``fsdp2``, ``ddp``): ``resident``, ``check_axes``,
            ``before_adopting``, ``make_adapter``, ``settle``, ``check_slot``, ``check_complete``, ``whole``,
            ``assign``.
        extra: more that must be equal on all ranks.
    """
    mesh = replicate if shard is None else shard
    try:
        settings.check()
        _check_model(model)
        axes = find_axes(model, shard, replicate, tuple(settings.independent_dims))
    except Exception as error:
        raise_everywhere(control_group(mesh, tuple(range(dist.get_world_size()))), error)
    control = control_group(mesh, axes.job)
    try:
        axes = with_ranks(axes, control)
        chosen = _choose(model, axes, predicate, settings)
        front.check_axes(axes, chosen)
        plan = _plan(model, chosen, axes, settings.plan_policy()) if chosen else None
        lines = _proposal(
            chosen, plan, *extra, settings.process_group_policy, settings.tp_buffer_reuse
        )
    except Exception as error:
        raise_everywhere(control, error)
    _agree(control, chosen, lines, settings.strict_init)
    if not chosen:
        return None
    warn_unusual(model, chosen)
    return _install(model, axes, chosen, plan, control, settings, front)


def _check_model(model) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    from dmuon.zero import seams  # which import this module

    if runtime_of(model, optional=True) is not None:
        raise ValueError("dedicate_params was called on this model already. Call it once.")
    sharded = [clean(path) for path, m in model.named_modules() if isinstance(m, fsdp2.FSDPModule)]
    if sharded:
        raise ValueError(
            f"module {sharded[0] or 'the model'!r} went through fully_shard already. Call "
            "dedicate_params before fully_shard."
        )
    seams.check_untouched(model)
    _check_unwrapped(model)


def _check_unwrapped(model: nn.Module) -> None:
    inside = (
        (f"its module {path!r}" if path else "the model", m) for path, m in model.named_modules()
    )
    what, wrapper = next(
        ((w, m) for w, m in inside if isinstance(m, _WRAPPERS)), ("the model", None)
    )
    wrapper = wrapper or replicas.wrapper_of_model(model)
    if wrapper is not None:
        raise ValueError(
            f"{what} went through {type(wrapper).__name__} already, which reduces all of its gradients. Call "
            "dedicate_params_ddp first, then DistributedDataParallel(model); or dedicate_params, then fully_shard "
            "instead of it. (accelerator.prepare(model) wraps too: it comes after.)"
        )


def _choose(model, axes: Axes, predicate, settings: Settings) -> list[Chosen]:
    chosen = collect(
        model,
        axes,
        predicate,
        PolicyTable(settings.param_policy, settings.compute_dtype),
        Boundaries(
            model,
            settings.hook_boundary_predicate,
            settings.hook_boundary_strict,
            settings.hook_boundary_resolver,
        ),
    )
    if not chosen and not settings.allow_empty:
        raise ValueError(nothing_selected(model))
    return chosen


def _agree(control, chosen: list[Chosen], lines: list[str], strict_init: bool) -> None:
    words = {
        "subject": "dedicate the same parameters",
        "advice": "Make the predicate a function of name, shape and dtype only, and build the same model "
        "on every rank.",
    }
    _C.agree(control.group_name, lines, **words)
    if strict_init:
        _C.agree(control.group_name, [_values(c) for c in chosen], **words)


def _plan(model, chosen, axes: Axes, policy):
    shard, replicate, tp = axes.sizes
    matrices = as_matrices(model, chosen, tp)
    return _C.make_plan(matrices=matrices, shard=shard, replicate=replicate, tp=tp, policy=policy)


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


def _install(model, axes: Axes, chosen, plan, control, settings: Settings, front) -> Runtime:
    runtime = Runtime(model, chosen, plan, axes, front)
    paths = list(dict.fromkeys(path for c in chosen for path in c.boundaries))
    unit_index = {unit.name: i for i, unit in enumerate(plan.units)}
    used = [
        sorted({unit_index[c.unit or "root"] for c in chosen if path in c.boundaries})
        for path in paths
    ]
    order = _registration_order(model, chosen, unit_index)
    device, device_type = chosen[0].parameter.device, axes.device_type
    reuse, policy = settings.tp_buffer_reuse, settings.process_group_policy
    runtime.control = control
    runtime.adapter = front.make_adapter(len(plan.units), axes.dp_size)
    runtime.ring = _C.FlightRing()
    runtime.engine = _C.Engine(
        plan=plan,
        boundaries=used,
        encloses=[any(_inside(other, path) for other in paths) for path in paths],
        order=_C.from_rank_0(control.group_name, order[::-1]),
        adapter=runtime.adapter,
        ring=runtime.ring,
        groups=channel_groups(axes, control, policy),
        lane_kind=_lane_kind(device_type, policy),
        device=torch.device(device_type) if device.type == "meta" else device,
        position=axes.position,
        layouts=[c.layout.as_tuple(c.parameter.shape) for c in chosen],
        share_gather_staging=reuse in (True, "all", "gather"),
        share_scatter_staging=reuse in (True, "all", "scatter"),
    )
    front.before_adopting(runtime)
    runtime.adopt()
    modules = {clean(path): module for path, module in model.named_modules()}
    for index, path in enumerate(paths):
        units = {plan.units[u].name for u in used[index]}
        params = [p for p in runtime.params if p.unit in units]
        runtime.boundary_hooks.append(Boundary(runtime, index, path, modules[path], params))
    checkpoint.install_hooks(runtime)
    register(model, runtime)
    if runtime.resident:
        reads.install()
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

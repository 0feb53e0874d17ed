"""DDP's side: whole weights on every rank, and what keeps the other parameters equal."""

import warnings
import weakref
from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon import _C, fsdp2
from dmuon.axes import check_mesh, ranks_of
from dmuon.errors import listed, nearest
from dmuon.groups import own_group
from dmuon.hooks import OfTheOriginal
from dmuon.integrations import seams
from dmuon.names import clean
from dmuon.runtime import Runtime, runtime_of, runtime_of_whole, runtimes
from dmuon.set_up import Predicate, Settings, set_up
from dmuon.tensor_parallel import local_part, wrapper_of

# Modules inside a DistributedDataParallel.
_wrapped: "weakref.WeakKeyDictionary[nn.Module, weakref.ref]" = weakref.WeakKeyDictionary()


def dedicate_params_ddp(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate,
    **keywords,
) -> Mapping[str, int]:
    """Give each chosen weight matrix one owner rank, with whole weights on every rank. Call it before
    ``replicate`` or ``DistributedDataParallel``.

    The owner alone holds the master and the momentum. Gradients of a unit are reduced to its owners as
    they arrive in backward; after ``Muon.step`` the owners publish the new weights, beside the next
    forward with ``replicate_async=True``. Between ``step`` and that forward ``p`` may still be the old
    value: ``dmuon.wait_all_replicate_broadcasts(model)`` ends that. Initial values are those of the mesh's first
    rank, as they are when ``dmuon.Muon`` is made; later ones are set by ``load_state_dict``.

    Collective over the job.

    Args:
        model: on the mesh's device.
        mesh: 1-D, the data-parallel ranks.
        predicate: ``(name, parameter) -> bool``; the same answer on every rank.
        keywords: those of ``dedicate_params`` but ``replicate_mesh`` and ``reshard_after_forward``.

    Returns:
        A read-only mapping from parameter name to owner rank, as ``dist.get_rank()`` counts.

    Raises:
        ValueError: with the same text on every rank, before anything has changed: a chosen parameter is
            tensor-parallel (``dedicate_params_ddp_tp``), the model went through
            ``DistributedDataParallel`` already, and what ``dedicate_params`` refuses.
    """
    return _dedicate(model, mesh, predicate, keywords, _Plain)


def dedicate_params_ddp_tp(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate,
    **keywords,
) -> Mapping[str, int]:
    """As ``dedicate_params_ddp``, with tensor parallelism inside each replica.

    Gradients are averaged over ``mesh``, gathered on one rank of the owner's TP group, which runs
    Newton-Schulz; the update goes back to the shards, and these to the other replicas. The TP axis is
    found from the parameters' DTensors, whatever its name.

    Collective over the job, all axes. Call it after ``parallelize_module``, before ``replicate_tp``.

    Args:
        model: on the mesh's device.
        mesh: 1-D, the data-parallel slice of a mesh with ``mesh_dim_names``.
        predicate: ``(name, parameter) -> bool``; the same answer on every rank. Parameters that are whole
            on every TP rank may be chosen as well.
        keywords: those of ``dedicate_params`` but ``replicate_mesh`` and ``reshard_after_forward``.

    Returns:
        A read-only mapping from parameter name to owner rank (the TP owner's), as ``dist.get_rank()``
        counts.

    Raises:
        ValueError: with the same text on every rank, before anything has changed: two TP dims, a mesh
            without dim names, and what ``dedicate_params_ddp`` refuses.
    """
    return _dedicate(model, mesh, predicate, keywords, _TensorParallel)


def _dedicate(model, mesh, predicate, keywords, front) -> Mapping[str, int]:
    check_mesh(mesh)
    seams.say_cpu(mesh)
    given = Settings(**_known(keywords))
    before = _fingerprints(model.named_parameters())
    runtime = set_up(model, None, mesh, predicate, given, front)
    if runtime is None:
        return MappingProxyType({})
    front.settle(runtime)  # weights are shown from now on, in their dtypes
    runtime.engine.show_residents()
    runtime.values_at_setup = [_state_of_values(p) for p in runtime.params]
    _warn_changed(before, {n: p.parameter for p in runtime.params for n in p.names})
    taken = _dedicated(runtime)
    names = [name for name, p in model.named_parameters() if id(p) in taken]
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", [])) | set(names)
    # torch's documented way to keep parameters from DistributedDataParallel.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return runtime.owners()


def _known(keywords: dict) -> dict:
    for key in keywords:
        if key not in Settings.__dataclass_fields__:
            raise ValueError(
                f"dedicate_params_ddp has {key!r}, {nearest(key, tuple(Settings.__dataclass_fields__))}"
            )
    return keywords


def _fingerprints(named) -> dict[str, float]:
    """By name; two tensors of one shape and another value have another one, as a rule."""
    return {clean(name): _fingerprint(p) for name, p in named if not p.is_meta}


@torch.no_grad()
def _fingerprint(tensor: torch.Tensor) -> tuple[float, float]:
    values = local_part(tensor).double()
    return values.sum().item(), values.square().sum().item()


def _warn_changed(before: Mapping, named: Mapping) -> None:
    """Once, on a rank that came with other values."""
    changed = [
        name
        for name, tensor in named.items()
        if name in before and before[name] != _fingerprint(tensor)
    ]
    if changed:
        warnings.warn(
            f"rank {dist.get_rank()} came with other initial values of {listed(changed)} than the rank "
            "they are now taken from. Seed all ranks alike, or ignore this.",
            stacklevel=4,
        )


def _dedicated(runtime: Runtime) -> set[int]:
    """Ids of the parameters."""
    return {id(p.parameter) for p in runtime.params}


class _Plain:
    """What ``set_up`` asks of the runtime."""

    resident = True

    @staticmethod
    def check_model(model: nn.Module) -> None:
        if isinstance(model, DistributedDataParallel) or model in _wrapped:
            raise ValueError(
                "the model went through DistributedDataParallel already, which reduces all of its "
                "gradients. Call dedicate_params_ddp first, then DistributedDataParallel(model)."
            )

    @staticmethod
    def check_axes(axes, chosen) -> None:
        cut = [c.name for c in chosen if isinstance(c.parameter, DTensor)]
        if cut:
            raise ValueError(
                f"{listed(cut)} are DTensors, sharded by parallelize_module. dedicate_params_ddp carries "
                "whole weights; call dedicate_params_ddp_tp(model, mesh, predicate), and replicate_tp for "
                "the other parameters."
            )

    @staticmethod
    def before_adopting(runtime: Runtime) -> None:
        """Initial values are those of the mesh's first rank, as in DistributedDataParallel."""
        for param in runtime.params:
            values = local_part(param.parameter.detach())
            if not values.is_meta:
                values.copy_(_of_first_rank(runtime.axes, values))

    whole, assign = staticmethod(fsdp2.whole), staticmethod(fsdp2.assign)
    like, states = staticmethod(fsdp2.like), staticmethod(fsdp2.states)

    @staticmethod
    def make_adapter(units: int, ranks: int) -> "_C.DdpAdapter":
        return _C.DdpAdapter(units, float(ranks))

    @staticmethod
    def settle(runtime: Runtime) -> None:
        """The dtypes of each unit: nobody else sets them."""
        for param in runtime.params:
            unit = runtime.adapter.unit(runtime.engine.unit_of(param.index))
            unit.compute_dtype = param.policy.param_dtype or param.dtype
            reduce = param.policy.grad_dtype or torch.float32
            unit.reduce_dtype = torch.float32 if reduce == torch.float64 else reduce

    @staticmethod
    def check_slot(param) -> None:
        """Raises ValueError where another system took a dedicated parameter."""
        current = param.parameter
        if isinstance(current, DTensor) and not param.was_dtensor:
            raise ValueError(
                f"the dedicated parameter {param.param_name!r} became a DTensor after "
                "dedicate_params_ddp. For fully_shard call dedicate_params; for parallelize_module "
                "dedicate_params_ddp_tp, after it."
            )

    @staticmethod
    def check_complete(runtime: Runtime) -> None:
        """Raises ValueError where nobody keeps the other parameters equal. Takes over values written since
        setup; collective, at the construction of Muon."""
        _check_replicated(runtime)
        _take_written(runtime)


def _check_replicated(runtime: Runtime) -> None:
    model, taken = runtime.model(), _dedicated(runtime)
    if runtime.axes.dp_size == 1 or runtime.replicas is not None or model in _wrapped:
        return
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in taken]
    if left:
        raise ValueError(
            f"nobody averages the gradients of {listed(left)}. Call dmuon.replicate(model, mesh) "
            "(replicate_tp with tensor parallelism) or DistributedDataParallel(model) before "
            "dmuon.Muon."
        )


def _state_of_values(param) -> tuple[int, int]:
    """Another one when somebody has written to the parameter, or replaced it."""
    return id(param.parameter), param.parameter._version


def _take_written(runtime: Runtime) -> None:
    """An initialisation after ``dedicate_params_ddp`` counts: the first rank's, if any rank has one.
    Where ``to_empty`` has made new parameters, the owner's; these are shown from now on."""
    written = [_was_written(p, runtime.values_at_setup[p.index]) for p in runtime.params]
    anywhere = torch.tensor(written, dtype=torch.int32)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=runtime.control)
    for param, changed in zip(runtime.params, anywhere.tolist()):
        if changed:
            values = local_part(param.parameter.detach())
            runtime.engine.set_value(param.index, _of_first_rank(runtime.axes, values))
    runtime.engine.show_residents()


def _was_written(param, before: tuple[int, int]) -> bool:
    now = _state_of_values(param)
    return now[0] == before[0] and now != before


def _of_first_rank(axes, values: torch.Tensor) -> torch.Tensor:
    """Collective over the data-parallel mesh."""
    first = values.contiguous().clone()
    if first.numel():
        group = axes.replicate.get_group()
        dist.broadcast(first, src=ranks_of(axes.replicate)[0], group=group)
    return first


class _TensorParallel(_Plain):
    @staticmethod
    def check_axes(axes, chosen) -> None:
        """Every mesh will do."""


def replicate(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_bytes: int = 25 << 20,
    broadcast_buffers: bool = True,
) -> nn.Module:
    """Keep the parameters that are not dedicated equal on all ranks of ``mesh``.

    Their values and the buffers become those of the mesh's first rank now; in each backward pass their
    gradients become the mean over the ranks, in buckets, beside backward. A parameter that no rank's loss
    reaches keeps its gradient; one that some reach counts as zero on the others. Buffers follow the first
    rank as in DistributedDataParallel: before each forward that comes after one with gradients, so also
    before the first one of an evaluation, which every rank must then call.

    Collective over ``mesh``. Call it after ``dedicate_params_ddp``.

    Args:
        mesh: 1-D, the one given to ``dedicate_params_ddp``.
        bucket_bytes: of gradients that travel together; 25 MiB is DistributedDataParallel's.
        broadcast_buffers: as DistributedDataParallel's.

    Returns:
        ``model``.

    Raises:
        ValueError: no dedicated parameters yet; tensor-parallel parameters (``replicate_tp``); the model
            is in a DistributedDataParallel; called twice.
    """
    symmetric = _symmetric(model, mesh)
    cut = [name for name, p in symmetric if isinstance(p, DTensor)]
    if cut:
        raise ValueError(
            f"{listed(cut)} are DTensors, sharded by parallelize_module. Call replicate_tp(model, mesh)."
        )
    return _replicate(model, mesh, symmetric, bucket_bytes, broadcast_buffers)


def replicate_tp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_bytes: int = 25 << 20,
    broadcast_buffers: bool = True,
) -> nn.Module:
    """As ``replicate``, where some parameters are tensor-parallel: of each, the shard of this TP rank is
    kept equal over the data-parallel ``mesh``. The TP axis may have any name.

    Collective over ``mesh``. Call it after ``dedicate_params_ddp_tp``.

    Args:
        mesh: 1-D, the data-parallel slice given to ``dedicate_params_ddp_tp``.
        bucket_bytes, broadcast_buffers: as ``replicate``'s.

    Returns:
        ``model``.

    Raises:
        ValueError: what ``replicate`` refuses, but for DTensors.
    """
    return _replicate(model, mesh, _symmetric(model, mesh), bucket_bytes, broadcast_buffers)


def _symmetric(model, mesh) -> list[tuple[str, nn.Parameter]]:
    check_mesh(mesh)
    runtime = _ddp_runtime(model)
    if ranks_of(mesh) != ranks_of(runtime.axes.data_parallel):
        raise ValueError(
            f"the mesh given to replicate, {mesh.mesh_dim_names or ''} of {mesh.size()} ranks, is not "
            "the one given to dedicate_params_ddp. Give both the same data-parallel slice."
        )
    if runtime.replicas is not None:
        raise ValueError("replicate was called on this model already. Call it once.")
    if runtime.model() in _wrapped:
        raise ValueError(
            "the model is in a DistributedDataParallel, which keeps the other parameters equal. Use "
            "either that or dmuon.replicate."
        )
    taken = _dedicated(runtime)
    return [(clean(name), p) for name, p in model.named_parameters() if id(p) not in taken]


def _ddp_runtime(model) -> Runtime:
    if runtime_of(model, optional=True) is None:
        raise ValueError(
            f"this {type(model).__name__} has no dedicated parameters. Call "
            "dedicate_params_ddp(model, mesh, predicate) first, then replicate; without dedicated "
            "parameters use DistributedDataParallel."
        )
    runtime = runtime_of_whole(model)
    if not isinstance(runtime.adapter, _C.DdpAdapter):
        raise ValueError(
            "the model was prepared for FSDP2 by dedicate_params, or for DeepSpeed by dedicate_params_zero, "
            "where fully_shard or DeepSpeed takes the other parameters. For replicated weights call dedicate_params_ddp, then replicate."
        )
    return runtime


def _replicate(model, mesh, symmetric, bucket_bytes, broadcast_buffers) -> nn.Module:
    runtime = runtime_of_whole(model)
    _agree_on(runtime, model, symmetric, bucket_bytes, broadcast_buffers)
    parameters = [p for _, p in symmetric]
    runtime.replicas = replicas = _C.Replicas(
        parameters=[(p, local_part(p), wrapper_of(p)) for p in parameters],
        group=own_group(mesh, "replicas").group_name,
        lane_kind=_C.LaneKind.host if mesh.device_type == "cpu" else _C.LaneKind.device,
        device=torch.device(mesh.device_type),
        bucket_bytes=bucket_bytes,
    )
    buffers = [b for b in model.buffers() if b.numel()]
    named = {**dict(symmetric), **{n: b for n, b in model.named_buffers() if b.numel()}}
    before = _fingerprints(named.items())
    replicas.broadcast([local_part(p.detach()) for p in parameters] + buffers, "(replicas)")
    _warn_changed(before, named)
    hook = _BeforeForward(weakref.ref(runtime), broadcast_buffers)
    runtime.replica_hook = model.register_forward_pre_hook(hook)
    return model


def _agree_on(runtime, model, symmetric, bucket_bytes, broadcast_buffers) -> None:
    """All ranks are about to exchange the same tensors in the same buckets."""
    tensors = [*symmetric, *((f"buffer {n}", b) for n, b in model.named_buffers())]
    lines = [
        f"{name}\t{tuple(t.shape)} {t.dtype}, requires_grad={t.requires_grad}"
        for name, t in tensors
    ]
    lines.append(
        f"the arguments of replicate\tbucket_bytes={bucket_bytes}, broadcast_buffers={broadcast_buffers}"
    )
    _C.agree(
        runtime.control.group_name,
        lines,
        subject="replicate the same parameters and buffers",
        advice="Build the same model on every rank, frozen alike.",
    )


def check_wrap(module: nn.Module) -> None:
    """Raises ValueError where ``DistributedDataParallel(module)`` would reduce what dmuon reduces."""
    runtime = runtime_of(module, optional=True)
    if runtime is not None and not isinstance(runtime.adapter, _C.DdpAdapter):
        raise ValueError(
            "the model was prepared for another runtime, by dedicate_params or dedicate_params_zero. For DistributedDataParallel call "
            "dedicate_params_ddp instead."
        )
    if runtime is not None and runtime.replicas is not None:
        raise ValueError(
            "dmuon.replicate was called on this model, which keeps the other parameters equal. Use "
            "either that or DistributedDataParallel."
        )


def check_shard(modules) -> None:
    """Raises ValueError where ``fully_shard(modules)`` would cut a model that holds whole weights."""
    taken = set().union(*(_dedicated(r) for r in runtimes() if r.resident))
    modules = modules if isinstance(modules, (list, tuple)) else [modules]
    if any(_is_deepspeeds(module) for module in modules):
        raise ValueError(
            "fully_shard after dedicate_params_zero: DeepSpeed trains this model, and cuts it at stage 3. For "
            "FSDP2 call dedicate_params(model, mesh, predicate) instead, then fully_shard."
        )
    named = (named for module in modules for named in module.named_parameters())
    whole = [clean(name) for name, p in named if id(p) in taken]
    if whole:
        raise ValueError(
            f"fully_shard after dedicate_params_ddp: {listed(whole)} are whole on every rank. For FSDP2 "
            "call dedicate_params(model, mesh, predicate) instead, then fully_shard."
        )


def _is_deepspeeds(module: nn.Module) -> bool:
    """Whether it has a weight that dedicate_params_zero hid."""
    inside = {id(m) for m in module.modules()}
    hidden = (r for r in runtimes() if isinstance(r.adapter, _C.ZeroAdapter))
    return any(id(s.module()) in inside for r in hidden for p in r.params for s in p.slots)


def note_wrapped(module: nn.Module, wrapper: DistributedDataParallel) -> None:
    _wrapped[module] = weakref.ref(wrapper)
    runtime = runtime_of(module, optional=True)
    if runtime is not None:
        module.register_forward_pre_hook(_AsWrapper(weakref.ref(runtime), weakref.ref(wrapper)))


class _AsWrapper(OfTheOriginal):
    """torch's wrapper decides in forward whether the backward of it averages."""

    def __init__(self, runtime, wrapper):
        self._runtime, self._wrapper = runtime, wrapper

    def __call__(self, module, args) -> None:
        runtime, wrapper = self._runtime(), self._wrapper()
        if wrapper is not None and torch.is_grad_enabled():
            runtime.adapter.set_forward_sync(wrapper.require_backward_grad_sync)


def wrapper_of_model(model: nn.Module) -> DistributedDataParallel | None:
    reference = _wrapped.get(model)
    return reference() if reference is not None else None


class _BeforeForward(OfTheOriginal):
    """Buffers follow the first rank before a forward if the one before could have changed them."""

    def __init__(self, runtime, buffers: bool):
        self._runtime, self._buffers, self._stale = runtime, buffers, False

    def __call__(self, module, args) -> None:
        runtime = self._runtime()
        runtime.replicas.watch()
        if self._buffers and self._stale:  # those it has now: a forward may make new ones
            runtime.replicas.broadcast([b for b in module.buffers() if b.numel()], "(buffers)")
        self._stale = torch.is_grad_enabled() and runtime.no_sync_depth == 0

"""``replicate`` and DistributedDataParallel: what is not dedicated is kept equal on all ranks."""

import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dmuon import _C
from dmuon.axes import check_mesh, ranks_of
from dmuon.errors import listed
from dmuon.groups import own_group
from dmuon.hooks import OfTheOriginal
from dmuon.initial_values import fingerprints, warn_changed
from dmuon.names import clean
from dmuon.runtime import Runtime, runtime_of, runtime_of_whole, runtimes
from dmuon.tensor_parallel import local_part, wrapper_of

# Modules inside a DistributedDataParallel.
_wrapped: "weakref.WeakKeyDictionary[nn.Module, weakref.ref]" = weakref.WeakKeyDictionary()


def dedicated_ids(runtime: Runtime) -> set[int]:
    """Ids of the parameters."""
    return {id(p.parameter) for p in runtime.params}


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
    taken = dedicated_ids(runtime)
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
    before = fingerprints(named.items())
    replicas.broadcast([local_part(p.detach()) for p in parameters] + buffers, "(replicas)")
    warn_changed(before, named)
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
    taken = set().union(*(dedicated_ids(r) for r in runtimes() if r.resident))
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

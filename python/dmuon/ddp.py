"""DDP's side: whole weights on every rank, and what keeps the other parameters equal."""

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
from dmuon.errors import check_keys, listed
from dmuon.initial_values import fingerprints, warn_changed
from dmuon.integrations import seams
from dmuon.replicas import dedicated_ids, wrapper_of_model
from dmuon.runtime import Runtime
from dmuon.set_up import Predicate, Settings, set_up
from dmuon.tensor_parallel import local_part


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
    check_keys(front.call, keywords, tuple(Settings.__dataclass_fields__))
    given = Settings(**keywords)
    before = fingerprints(model.named_parameters())
    runtime = set_up(model, None, mesh, predicate, given, front)
    if runtime is None:
        return MappingProxyType({})
    front.settle(runtime)  # weights are shown from now on, in their dtypes
    runtime.engine.show_residents()
    runtime.values_at_setup = [_state_of_values(p) for p in runtime.params]
    warn_changed(before, {n: p.parameter for p in runtime.params for n in p.names})
    taken = dedicated_ids(runtime)
    names = [name for name, p in model.named_parameters() if id(p) in taken]
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", [])) | set(names)
    # torch's documented way to keep parameters from DistributedDataParallel.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return runtime.owners()


class _Plain:
    """What ``set_up`` asks of the runtime."""

    call = "dedicate_params_ddp"
    resident = True

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
    model, taken = runtime.model(), dedicated_ids(runtime)
    if (
        runtime.axes.dp_size == 1
        or runtime.replicas is not None
        or wrapper_of_model(model) is not None
    ):
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
    call = "dedicate_params_ddp_tp"

    @staticmethod
    def check_axes(axes, chosen) -> None:
        """Every mesh will do."""

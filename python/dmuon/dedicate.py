"""``dedicate_params``: the setup of FSDP2 training."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon import fsdp2
from dmuon.axes import check_mesh
from dmuon.integrations import seams
from dmuon.set_up import Predicate, Settings, set_up


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
            with ``route`` (``"muon"``; ``"adamw"``, on the owner; ``"sharded_adamw"``, left to the
            runtime), ``view`` (of more than two dims: ``"flatten"``, rows are dim 0, or ``"batch"`` of
            matrices), ``param_dtype`` to compute in, ``grad_dtype`` in which gradients travel,
            ``output_dtype``, ``cast_forward_inputs``; later overrides win. ``master_dtype`` and
            ``optim_dtype`` are accepted where they say what is: float32.
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
    seams.say_cpu(mesh)
    if replicate_mesh is not None:
        check_mesh(replicate_mesh, "replicate_mesh")
    settings = Settings(
        hook_boundary_predicate=hook_boundary_predicate,
        hook_boundary_strict=hook_boundary_strict,
        hook_boundary_resolver=hook_boundary_resolver,
        param_policy=param_policy,
        compute_dtype=compute_dtype,
        tp_buffer_reuse=tp_buffer_reuse,
        process_group_policy=process_group_policy,
        owner_strategy=owner_strategy,
        owner_cost_model=owner_cost_model,
        max_owners_per_group=max_owners_per_group,
        pack_small_params=pack_small_params,
        memory_limit_bytes=memory_limit_bytes,
        independent_dims=tuple(independent_dims),
        strict_init=strict_init,
        allow_empty=allow_empty,
    )
    runtime = set_up(
        model, mesh, replicate_mesh, predicate, settings, fsdp2, (reshard_after_forward,)
    )
    if runtime is None:
        return MappingProxyType({})
    for unit in range(len(runtime.plan.units)):
        runtime.adapter.unit(unit).reshard_after_forward = reshard_after_forward
    return runtime.owners()

"""What moves per step, from the plan alone."""

from torch import nn

from dmuon.runtime import runtime_of

_UPDATE_BYTES = 4  # gathered gradients and scattered updates are float32


def summarize_comm_plan(model: nn.Module) -> dict:
    """What moves per step: per unit its owners, messages and bytes; and the totals of the whole job.

    Bytes are those on the wire, in the job: a broadcast or a reduction of P bytes over N ranks takes
    (N-1) P. ``materialise_bytes`` and ``reduce_bytes`` move within the replicas,
    ``replicate_reduce_bytes`` and ``publish_bytes`` between them, ``tp_gather_bytes`` and
    ``tp_scatter_bytes`` between the tensor-parallel ranks of an owner. JSON-friendly. Local.
    """
    runtime = runtime_of(model)
    runtime.settle()
    units = [_unit(runtime, i, unit) for i, unit in enumerate(runtime.plan.units)]
    return {
        "ranks": len(runtime.global_ranks),
        "axes": dict(zip(("shard", "replicate", "tp"), runtime.axes.sizes)),
        "units": units,
        "bytes_per_step": sum(_per_step(unit) for unit in units),
    }


def _unit(runtime, index: int, unit) -> dict:
    settings = runtime.adapter.unit(index)
    shard, replicate, tp = runtime.axes.sizes
    params = [runtime.params[m] for segment in unit.segments for m in segment.matrices]
    computing, reducing = settings.compute_dtype.itemsize, settings.reduce_dtype.itemsize
    held = sum(p.full_shape.numel() * (tp if p.shard_dim is None else 1) for p in params)
    within, between = replicate * (shard - 1) * held, (replicate - 1) * held
    gathered, scattered = _tp_bytes(runtime, params)
    return {
        "unit": unit.name,
        "matrices": len(params),
        "owners": sorted({p.owner_rank for p in params}),
        "messages_per_materialisation": _messages(runtime, unit),
        "materialisations_per_step": _materialisations(runtime, settings),
        "materialise_bytes": within * computing,
        "reduce_bytes": within * reducing,
        "replicate_reduce_bytes": between * reducing,
        "publish_bytes": between * computing,
        "tp_gather_bytes": gathered,
        "tp_scatter_bytes": scattered,
        "compute_dtype": str(settings.compute_dtype),
        "reduce_dtype": str(settings.reduce_dtype),
    }


def _materialisations(runtime, settings) -> int:
    """DDP and ZeRO-0 to 2 keep weights, ZeRO-3 always frees them; FSDP2 was told."""
    if runtime.resident:
        return 0
    return 2 if getattr(settings, "reshard_after_forward", True) else 1


def _messages(runtime, unit) -> int:
    """One from each holder, a rank whose shard coordinate is an owner's; or one for each matrix."""
    if not runtime.plan.pack:
        return len(unit.segments)
    return len({segment.owner % runtime.axes.sizes[0] for segment in unit.segments})


def _tp_bytes(runtime, params) -> tuple[int, int]:
    """Gradients to the TP owners and updates back; Gram matrices and factors where they stay in
    shards."""
    gathered = scattered = 0
    optimizer, tp = runtime.optimizer(), runtime.axes.sizes[2]
    for p in params:
        if p.route == "adamw" or tp == 1:
            continue
        if p.in_shards:
            half = optimizer._muon.tp_bytes(runtime.engine, p.index)[1] // 2
            gathered, scattered = gathered + half, scattered + half
        elif p.shard_dim is None:
            scattered += (tp - 1) * p.numel * _UPDATE_BYTES
        else:
            tp_owner = p.cell_ranks.index(p.owner_rank)
            away = p.numel - p.layout.numel_on(p.full_shape, tp_owner)
            gathered, scattered = gathered + away * _UPDATE_BYTES, scattered + away * _UPDATE_BYTES
    return gathered, scattered


def _per_step(unit: dict) -> int:
    once = ("reduce", "replicate_reduce", "publish", "tp_gather", "tp_scatter")
    fetched = unit["materialisations_per_step"] * unit["materialise_bytes"]
    return fetched + sum(unit[f"{channel}_bytes"] for channel in once)

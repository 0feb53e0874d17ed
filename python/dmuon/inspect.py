"""What dmuon did and will do, as plain data. Local: no collectives."""

from collections.abc import Mapping

from torch import nn

from dmuon import _C
from dmuon.runtime import DedicatedParam, runtime_of


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter, sorted by name: the same order on every rank."""
    return list(runtime_of(model).params)


def get_owned_params(model: nn.Module, rank: int) -> list[DedicatedParam]:
    """Those whose owner is ``rank``, as ``dist.get_rank()`` counts."""
    return [param for param in runtime_of(model).params if param.owner_rank == rank]


def summarize_param_groups(model: nn.Module, optimizer) -> list[dict]:
    """One entry per group: name, route, how many tensors and elements, its settings."""
    runtime_of(model)
    skipped = ("params", "foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad")
    return [
        {
            "tensors": len(group["params"]),
            "numel": sum(p.numel() for p in group["params"]),
            **{key: _plain(value) for key, value in group.items() if key not in skipped},
        }
        for group in optimizer.param_groups
    ]


def _plain(value):
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def summarize_comm_plan(model: nn.Module) -> dict:
    """What moves per step: per unit its owners, messages and bytes; and the totals of the whole job.

    Bytes are those on the wire, in the job: a broadcast or a reduction of P bytes takes (N-1) P.
    """
    runtime = runtime_of(model)
    runtime.settle()
    others = len(runtime.global_ranks) - 1
    units = []
    for i, unit in enumerate(runtime.plan.units):
        settings = runtime.adapter.unit(i)
        numel = sum(_numel(runtime.plan, segment) for segment in unit.segments)
        materialisations = 2 if settings.reshard_after_forward else 1
        units.append(
            {
                "unit": unit.name,
                "matrices": sum(len(segment.matrices) for segment in unit.segments),
                "owners": sorted({runtime.global_ranks[s.owner] for s in unit.segments}),
                "messages_per_materialisation": len(unit.segments),
                "materialisations_per_step": materialisations,
                "materialise_bytes": others * numel * settings.compute_dtype.itemsize,
                "reduce_bytes": others * numel * settings.reduce_dtype.itemsize,
                "compute_dtype": str(settings.compute_dtype),
                "reduce_dtype": str(settings.reduce_dtype),
            }
        )
    per_step = sum(
        u["materialisations_per_step"] * u["materialise_bytes"] + u["reduce_bytes"] for u in units
    )
    return {"ranks": others + 1, "units": units, "bytes_per_step": per_step}


def _numel(plan, segment) -> int:
    shapes = (plan.matrices[m] for m in segment.matrices)
    return sum(m.batch * m.rows * m.cols for m in shapes)


def report(model: nn.Module) -> Mapping:
    """What this rank has done since setup, and the plan it follows. JSON-friendly."""
    runtime = runtime_of(model)
    plan, optimizer = runtime.plan, runtime.optimizer()
    loads = plan.loads()
    muon = optimizer._muon if optimizer is not None else None
    options = optimizer._ns_options if optimizer is not None else None
    return {
        "rank": runtime.global_rank,
        "ranks": len(runtime.global_ranks),
        "matrices": len(runtime.params),
        "units": len(plan.units),
        "routes": _count(param.route for param in runtime.params),
        "owned": [p.param_name for p in runtime.params if p.is_owner],
        "owners": {p.param_name: p.owner_rank for p in runtime.params},
        "load_flops": {r: load for r, load in zip(runtime.global_ranks, loads)},
        "load_max_over_mean": plan.report.max_load / (plan.report.mean_load or 1),
        "w_star": plan.report.w_star,
        "max_state_bytes": plan.report.max_state_bytes,
        "state_bytes_bound": plan.report.state_bytes_bound,
        "state_bytes": {r: b for r, b in zip(runtime.global_ranks, plan.state_bytes())},
        "ns_calls": muon.ns_calls() if muon else 0,
        "ns_calls_last_step": muon.ns_calls_last_step() if muon else 0,
        "ns_kernels": _kernels(plan, options) if options else {},
        "sent_bytes_total": runtime.ring.total_sent_bytes(),
        "plan_digest": plan.digest(),
        "initial_values": "the owner's",
        **runtime.engine.counters(),
    }


def _count(values) -> dict:
    counts: dict = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _kernels(plan, options) -> dict[str, str]:
    """Shape -> the kernel that runs for it."""
    return {
        f"{m.batch}x{m.rows}x{m.cols}": _C.newton_schulz_kernel(m.batch, m.rows, m.cols, options)
        for m in plan.matrices
        if m.route == _C.Route.muon
    }

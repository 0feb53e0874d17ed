"""What dmuon did and will do, as plain data. Local: no collectives."""

from torch import nn

from dmuon import _C
from dmuon.runtime import DedicatedParam, runtime_of
from dmuon.step_report import Report


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter, sorted by name: the same order on every rank. Local.

    Raises:
        ValueError: the model has no dedicated parameters.
    """
    return list(runtime_of(model).params)


def get_owned_params(model: nn.Module, rank: int) -> list[DedicatedParam]:
    """The dedicated parameters whose master lies on ``rank``, sorted by name. With tensor parallelism each
    rank of the owner's TP group lists its shard; one of them has ``is_tp_owner``. Local.

    Args:
        rank: as ``dist.get_rank()`` counts, on any mesh.

    Raises:
        ValueError: the model has no dedicated parameters.
    """
    return [param for param in runtime_of(model).params if rank in param.cell_ranks]


def summarize_param_groups(model: nn.Module, optimizer) -> list[dict]:
    """One entry per group: name, route, how many tensors and elements, its settings. Under ZeRO those of the
    ``OwnerOptimizer``, whichever optimizer of the engine's is given. JSON-friendly. Local."""
    runtime = runtime_of(model)
    if isinstance(runtime.adapter, _C.ZeroAdapter):
        return runtime.front.summarize_groups()
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


def report(model: nn.Module) -> Report:
    """What this rank has done since setup, the plan it follows, and where the time of its last step went. Local. A
    dictionary of plain data: ``print`` it, ``json.dumps`` it or call ``to_json()``, ``plot("step.png")`` it.

    ``ns_calls``: Newton-Schulz runs of this rank since setup; ``ns_calls_last_step``: of the last step,
    which summed over the job is the number of matrices. ``ns_workspace_bytes``: what Newton-Schulz keeps
    between steps on this rank, its input among it. ``sent_bytes_last_step``: what this rank has put
    on the wire for dedicated matrices since the step before, by ``sent_bytes_by_channel`` since setup.
    ``load_max_over_mean``: FLOPs of Newton-Schulz on the busiest rank over the mean. ``reduce_wait_us``:
    what the training thread has waited for reductions, in microseconds. ``ranks_planned`` and
    ``parameters``: one record for each; a parameter's ``kernel`` is the Newton-Schulz that runs for it.

    ``last_step``: None before the first one; else seconds of this rank's host, by a monotonic clock. The last
    step lasts from the end of the one before (the first: from setup) to the end of ``step()``; a ``step()`` that
    raises ends none. On an accelerator the host enqueues and goes on: its times are not the device's.

    - ``seconds``: of the whole step. ``phases``, of the training thread, add up to it:

      - ``forward``: from the first dedicated unit's forward to the first hook of a backward pass: the model, the
        loss, and what the runtime does and waits for by itself. ``backward``: from there to the end of the pass.
        ``other``: outside of these and of ``step()``: data, clipping, the script; under DeepSpeed its step, too, up
        to the update of the matrices.
      - ``forward_fetch``, ``backward_fetch``: whole weights were issued and waited for.
      - ``reduce_issue``: gradients were packed and sent. ``reduce_wait``: waiting for their sums, and adding up
        small ones: the tail of a pass that nothing hides.
      - ``tp_exchange``: packing, sending and waiting for gradients, updates and factors over the TP axis.
      - ``agreement``: one small all-reduce per pass, step and norm. It waits for the slowest rank.
      - ``checks``: gradients were read for what is not finite; bookkeeping of the step.
      - ``newton_schulz``: momentum, Newton-Schulz and update of what this rank owns, on either route.
      - ``publish``: updated weights for other replicas: issued, and waited for where they were not there in time.
      - ``adamw``: the rest of ``step()``: AdamW of the parameters that are not dedicated; under DeepSpeed the
        rest of its step.

    - ``waiting_seconds``: of it, the phases of communication: both fetches, ``reduce_wait``, ``tp_exchange``,
      ``agreement``, ``publish``.
    - ``beside``: what goes on beside the training thread. ``seconds``: while there was any of it;
      ``hidden_seconds``: of these, while the training thread was in another phase than those. ``fetch``: of one ahead of its use, from the
      issue until the thread has the weights; ``reduce``: from the issue until the sum is there, a small one
      (less than 1 MiB) until the thread adds it up: at most what was on the wire took so long; ``tp``: while
      the lane gathers, and from an update's issue until it is there; ``publish``: while the lane copies and sends,
      as a rule beside the forward of the next step, and counted there.

    Raises:
        ValueError: the model has no dedicated parameters.
    """
    runtime = runtime_of(model)
    plan, optimizer = runtime.plan, runtime.optimizer()
    muon = optimizer._muon if optimizer is not None else None
    clock = runtime.engine.clock()
    facts = {
        "rank": runtime.global_rank,
        "ranks": len(runtime.global_ranks),
        "runtime": _runtime_name(runtime),
        "topology": dict(zip(("shard", "replicate", "tp"), runtime.axes.sizes)),
        "device": runtime.axes.device_type,
        "matrices": len(runtime.params),
        "units": len(plan.units),
        "routes": _count(param.route for param in runtime.params),
        "ns_calls": muon.ns_calls() if muon else 0,
        "ns_calls_last_step": muon.ns_calls_last_step() if muon else 0,
        "ns_workspace_bytes": muon.ns_workspace_bytes() if muon else 0,
        **runtime.engine.counters(),
        "sent_bytes_total": runtime.ring.total_sent_bytes(),
        "load_max_over_mean": plan.report.max_load / (plan.report.mean_load or 1),
        "w_star": plan.report.w_star,
        "max_state_bytes": plan.report.max_state_bytes,
        "state_bytes_bound": plan.report.state_bytes_bound,
        "initial_values": "the owner's",
        "plan_digest": plan.digest(),
        "sent_bytes_by_channel": runtime.ring.sent_by_channel(),
        "tensor_parallel": _tensor_parallel(runtime, muon),
        "ranks_planned": [
            {"rank": rank, "matrices": owned, "flops": load, "state_bytes": state}
            for rank, owned, load, state in zip(
                runtime.global_ranks, _owned_counts(plan), plan.loads(), plan.state_bytes()
            )
        ],
        "parameters": [_describe(param, optimizer) for param in runtime.params],
        "last_step": clock.last_step() if clock.steps() else None,
    }
    return Report(facts, clock.spans())


def _runtime_name(runtime) -> str:
    kinds = {_C.Fsdp2Adapter: "FSDP2", _C.DdpAdapter: "DDP", _C.ZeroAdapter: "DeepSpeed ZeRO"}
    return next(name for kind, name in kinds.items() if isinstance(runtime.adapter, kind))


def _tensor_parallel(runtime, muon) -> dict | None:
    """What moves over the TP axis; None without one. Bytes are per step, in one owner's TP group; of
    staging, on this rank."""
    tp = runtime.axes.sizes[2]
    if tp == 1:
        return None
    staging = {}
    for direction, shared, largest, total in runtime.engine.tp_staging():
        staging[direction] = {
            "reused": shared,
            "bytes": 4 * (largest if shared else total),
            "saved_bytes": 4 * (total - largest) if shared else 0,
        }
    in_shards = []
    for index in muon.in_shards() if muon else ():
        whole, shards = muon.tp_bytes(runtime.engine, index)
        in_shards.append(
            {
                "name": runtime.params[index].param_name,
                "bytes": shards,
                "saved_bytes": whole - shards,
            }
        )
    return {
        "size": tp,
        "dim": runtime.axes.tp_dim,
        "distributed_gram": in_shards,
        "distributed_gram_saved_bytes": sum(m["saved_bytes"] for m in in_shards),
        "staging": staging,
    }


def _owned_counts(plan) -> list[int]:
    counts = [0] * len(plan.loads())
    tp = len(counts) // plan.cells
    for cell, tp_owner in zip(plan.owners, plan.tp_owners):
        counts[cell * tp + tp_owner] += 1
    return counts


def _describe(param: DedicatedParam, optimizer) -> dict:
    matrix = param.runtime.plan.matrices[param.index]
    kernel = ""
    if optimizer is not None and param.route == "muon":
        shape = (matrix.batch, matrix.rows, matrix.cols)
        device = param.slots[0].current.device.type
        kernel = _C.newton_schulz_kernel_on(device, *shape, optimizer._ns_options)
        if param.in_shards:
            kernel = "gram in shards"
    return {
        "name": param.param_name,
        "shape": list(param.full_shape),
        "unit": param.unit,
        "owner": param.owner_rank,
        "ranks": param.cell_ranks,
        "shard_dim": param.shard_dim,
        "route": param.route,
        "kernel": kernel,
    }


def _count(values) -> dict:
    counts: dict = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts

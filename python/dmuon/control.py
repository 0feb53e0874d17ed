"""Manual control over a step: accumulation, waiting, clipping."""

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dmuon import _C, replicas
from dmuon.patch import original, users_gradient_sync
from dmuon.runtime import Runtime, runtime_of, runtime_of_whole, runtimes


@contextlib.contextmanager
def no_sync(model: nn.Module):
    """Accumulate gradients without reducing them, of dedicated and symmetric parameters.

    The first backward outside reduces the sum: k micro-batches equal one large batch. Nests; an
    exception inside leaves everything as it was outside. A context manager. Local, but every rank must do
    the same.

    Raises:
        ValueError: the model has no dedicated parameters; DeepSpeed runs it at stage 2 or 3, where every
            micro-batch is reduced.
    """
    runtime = runtime_of_whole(model)
    wrapper = replicas.wrapper_of_model(runtime.model())
    if isinstance(runtime.adapter, _C.ZeroAdapter):
        with runtime.front.no_sync():
            yield
        return
    with contextlib.ExitStack() as stack:
        if wrapper is not None:
            stack.enter_context(original("no_sync")(wrapper))
        stack.enter_context(held(runtime))
        yield


@contextlib.contextmanager
def held(runtime: Runtime):
    """No reduction of what dmuon or FSDP2 reduces."""
    modules = [m for m in runtime.model().modules() if isinstance(m, FSDPModule)]
    runtime.adapter.enter_no_sync()
    runtime.no_sync_depth += 1
    try:
        if runtime.no_sync_depth == 1:
            _set_fsdp_sync(modules, lambda module: False)
            runtime.set_replicas_sync(False)
        yield
    finally:
        runtime.adapter.leave_no_sync()
        runtime.no_sync_depth -= 1
        if runtime.no_sync_depth == 0:
            _set_fsdp_sync(modules, users_gradient_sync)
            runtime.set_replicas_sync(True)


def _set_fsdp_sync(modules: list[FSDPModule], value_of) -> None:
    """Past our own wrapper, which keeps what the user has set."""
    setter = original("set_requires_gradient_sync")
    for module in modules:
        setter(module, value_of(module), recurse=False)


def wait_all_reduces(model: nn.Module) -> None:
    """Let every reduction in flight end; afterwards owners hold reduced gradients.

    ``backward`` ends that way and ``Muon.step`` begins that way, so that no call is needed.
    Idempotent, legal at any point of a step. Local: it waits for what ``backward`` has begun on all ranks,
    and begins nothing.
    """
    runtime_of(model).engine.wait_reductions()


def prepare_muon_grads(model: nn.Module) -> None:
    """Make the owners' gradients ready to be read or changed before ``Muon.step``: the same as
    ``wait_all_reduces``.

    On its owner ``p.grad`` is then the mean over the data-parallel ranks, float32, of the shape of ``p``;
    elsewhere it is None. Idempotent, legal at any point of a step. Local.
    """
    wait_all_reduces(model)


def broadcast_all_updates(model: nn.Module) -> None:
    """Publish every owner's weights and wait: the next forward anywhere computes with them.

    ``Muon.step`` publishes, so that no call is needed after it; what has been written into
    ``_owned_data`` by hand needs one. Collective over the job; idempotent, legal at any point of a step.
    """
    broadcast_all_updates_async(model)
    wait_all_replicate_broadcasts(model)


def broadcast_all_updates_async(model: nn.Module) -> None:
    """Start what ``broadcast_all_updates`` waits for; it runs beside the next forward, which waits for
    what it needs. Idempotent, legal at any point of a step. Collective over the job."""
    runtime_of(model).engine.publish_all()


def wait_all_replicate_broadcasts(model: nn.Module) -> None:
    """Let every pending publish end: afterwards this rank's copies are what the owners have sent.

    Call it before you read ``p`` under DDP between ``step`` and the next forward, and before
    ``destroy_process_group`` where a backend aborts there. Idempotent, legal at any point of a step. Local: it
    waits for what ``step`` has begun on all ranks, and begins nothing.
    """
    runtime_of(model).engine.wait_publishes()


def clip_grad_norm_(
    optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the global norm of all gradients of ``optimizer``, dedicated and symmetric.

    Each element counts once in the whole job. Gradients are scaled in place, before momentum, by
    ``max_norm / (norm + 1e-6)`` where that is below 1, as torch does. Collective over the job.

    Args:
        optimizer: a ``dmuon.Muon``.
        max_norm: of all gradients together, at least 0; ``inf`` to measure alone.
        norm_type: p >= 0; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise instead of scaling by a norm that is NaN or infinite.

    Returns:
        The norm before clipping: 0-dim float32, the same on all ranks.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set. On all ranks.
        ValueError: ``optimizer`` is not a ``dmuon.Muon``; ``max_norm`` or ``norm_type`` is negative or NaN.
    """
    runtime = getattr(optimizer, "_runtime", None)
    if not isinstance(runtime, Runtime):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}; clip_grad_norm_ takes the dmuon.Muon. (DeepSpeed "
            'clips by itself: set "gradient_clipping" in its config.)'
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return clip_dedicated(parameters, max_norm, norm_type, error_if_nonfinite)


def clip_dedicated(parameters, max_norm, norm_type, error_if_nonfinite) -> torch.Tensor | None:
    """The same over ``parameters``; None where none of them is dedicated."""
    dedicated = {id(p.parameter): p for runtime in runtimes() for p in runtime.params}
    chosen = [dedicated[id(p)] for p in parameters if id(p) in dedicated]
    refuse_under_deepspeed(parameters)
    if not chosen:
        return None
    engine = chosen[0].runtime.engine
    if any(param.runtime.engine is not engine for param in chosen):
        raise ValueError("parameters of two dedicated models cannot be clipped by one norm.")
    symmetric = [p for p in parameters if id(p) not in dedicated]
    counts = [chosen[0].runtime.counts(p) for p in symmetric]
    gradients = _C.GradientSet([param.index for param in chosen], symmetric, counts)
    norm = _C.clip_gradients(
        engine, gradients, float(max_norm), float(norm_type), error_if_nonfinite
    )
    return torch.tensor(norm, dtype=torch.float32)


def refuse_under_deepspeed(parameters) -> None:
    """There gradients are reduced in ``engine.step``: a norm before it would be of this rank's alone, and
    without the dedicated ones, which ``parameters()`` does not list."""
    given = {id(p) for p in parameters}
    for runtime in runtimes():
        if isinstance(runtime.adapter, _C.ZeroAdapter) and _holds(runtime, given):
            raise ValueError(
                "these are parameters of a model that DeepSpeed trains, and whose gradients it reduces in "
                'engine.step(). Set "gradient_clipping" in its config: it clips by the norm of all gradients, '
                "and engine.get_global_grad_norm() tells it."
            )


def _holds(runtime: Runtime, ids: set[int]) -> bool:
    mine = [*runtime.model().parameters(), *(p.parameter for p in runtime.params)]
    return any(id(p) in ids for p in mine)

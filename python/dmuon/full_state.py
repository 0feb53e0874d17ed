"""Whole dictionaries: what one process would save, from any topology and into any other."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon.checkpoint import OwnedTensor, from_owner
from dmuon.extra_state import extra_states, snapshot_of
from dmuon.given import Source, misfits
from dmuon.names import clean
from dmuon.runtime import Runtime, runtime_of_whole
from dmuon.tensor_parallel import overlapping


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module, *, cpu_offload: bool = True, rank0_only: bool = True
) -> dict[str, torch.Tensor]:
    """Whole tensors by name, equal to what a single process would save: dedicated weights from their
    owners, the runtime's shards put together, buffers and tied names included.

    Collective over the job. Pending publishes end first. Beyond the result, each rank holds one whole
    parameter at a time.

    Args:
        cpu_offload: the tensors are on the CPU.
        rank0_only: ranks other than the job's first get an empty dictionary.

    Returns:
        Copies, in the dtypes of the parameters, in the order of ``model.state_dict()``.
    """
    runtime = runtime_of_whole(model)
    runtime.engine.wait_publishes()
    extras = extra_states(runtime.model())
    dedicated = {name: param for param in runtime.params for name in param.names}
    receives = not rank0_only or runtime.global_rank == runtime.axes.job[0]
    state = runtime.model().state_dict()
    held = _model_tensors(runtime, state)
    whole: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}  # name of each tensor: a tied one has several
    made = {k: v for k, v in state.items() if clean(k) not in held and clean(k) not in extras}
    if made:  # by hooks of the model's own, such as parts of a fused weight
        state |= gather_owned(made, runtime.control, runtime.job_group)
    for key, value in state.items():
        name = clean(key)
        if name in extras:
            whole[name] = snapshot_of(value)
            continue
        mine = held.get(name, value)
        tied = first.setdefault(id(dedicated.get(name, mine)), name)
        if tied in whole:
            whole[name] = whole[tied]
            continue
        value = _master(dedicated[name]) if name in dedicated else runtime.front.whole(mine)
        whole[name] = snapshot(value, cpu_offload) if receives else None
    return whole if receives else {}


def gather_owned(state: Mapping, control=None, group=None) -> dict[str, torch.Tensor]:
    """Of a state dict: what is an ``OwnedTensor`` on some rank, whole on every rank. Collective.

    Args:
        control: for objects, ``group`` for tensors; both of the same ranks, by default all.
    """
    mine = {
        key: (value._dmuon_owner, value.shape, value.dtype)
        for key, value in state.items()
        if isinstance(value, OwnedTensor)
    }
    everyone: list[dict] = [{}] * dist.get_world_size(control)
    dist.all_gather_object(everyone, mine, group=control)
    gathered = {}
    for key, (owner, shape, dtype) in sorted(
        {k: v for m in everyone for k, v in m.items()}.items()
    ):
        held = state[key]
        if isinstance(held, DTensor):
            held = held.full_tensor()
        if isinstance(held, OwnedTensor):
            held = torch.empty(shape, dtype=dtype, device=held.device)
        gathered[key] = held.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(gathered[key], src=owner, group=group)
    return gathered


def _master(param) -> torch.Tensor:
    """On every rank of the job, in the dtype of the parameter."""
    return from_owner(param, param._owned_data).to(param.dtype)


def snapshot(value: torch.Tensor, cpu_offload: bool) -> torch.Tensor:
    """A copy: training goes on in the memory of the original."""
    value = value.detach()
    return value.to("cpu" if cpu_offload else value.device, copy=True)


def set_model_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Load whole tensors by name, such as ``get_model_state_dict`` or one process gives.

    Strict, and all or nothing: the ranks agree that everything fits before the first write. Collective over
    the job: every rank gives the whole dictionary, or the job's first one alone and the others an empty one,
    as ``get_model_state_dict`` gives it; then tensors are sent one at a time. What modules have of
    ``get_extra_state`` they get back by ``set_extra_state``. Under DeepSpeed a weight goes to the
    float32 copy of its optimizer as well as to the one that computes.

    Args:
        state_dict: whole tensors by the names of ``model.state_dict()``, on any device, of any dtype that the
            model's can hold: no complex numbers for real ones, no fractions for integers.

    Raises:
        ValueError: on all ranks, naming what is missing, unexpected, of another shape, sparse or a part of a tensor;
            one tied weight has two values; a rank gave no dictionary while others did.
    """
    runtime = runtime_of_whole(model)
    held = _model_tensors(runtime, runtime.model().state_dict())
    dedicated = {name: param for param in runtime.params for name in param.names}
    wanted = {name: _like(runtime, dedicated.get(name), mine) for name, mine in held.items()}
    extras = extra_states(runtime.model())
    what = "the model's state_dict"

    def problem(given: Mapping) -> str:
        fits = misfits(what, given, wanted | dict.fromkeys(extras))
        kept = {name: mine for name, mine in held.items() if name not in dedicated}
        return fits or _overlap(kept) or _two_values(what, given, held, dedicated)

    source = Source(runtime, state_dict, problem, what)
    for name, mine in held.items():
        value = source.given[name] if source.has_it else None
        value = source.take(value, wanted[name], mine.device)
        if name in dedicated:
            runtime.set_value(dedicated[name], value)
        else:
            runtime.front.assign(mine, value)
    for name, module in extras.items():
        module.set_extra_state(source.tell(source.given[name] if source.has_it else None))
    runtime.spread_values()
    runtime.engine.show_residents()


def _overlap(kept: Mapping[str, torch.Tensor]) -> str:
    found = overlapping(kept)
    if not found:
        return ""
    return (
        f"{found[0]!r} is expanded: several of its elements are one in memory. Make it contiguous."
    )


def _two_values(what: str, given: Mapping, held: Mapping, dedicated: Mapping) -> str:
    first: dict[int, str] = {}
    for name, mine in held.items():
        other = first.setdefault(id(dedicated.get(name, mine)), name)
        if not _same(given[other], given[name]):
            return f"{what} has two values for one tied weight, {other!r} and {name!r}."
    return ""


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _like(runtime: Runtime, param, mine: torch.Tensor) -> torch.Tensor:
    """On the meta device: what the whole dictionary has of it."""
    if param is None:
        return runtime.front.like(mine)
    return torch.empty(param.full_shape, dtype=param.dtype, device="meta")


def _model_tensors(runtime: Runtime, state: Mapping) -> dict[str, torch.Tensor]:
    """What ``state``, the module's dictionary, lists, with whole shapes: the parameters and buffers themselves. That
    comes first: with it FSDP2 frees what a forward has left whole."""
    model = runtime.model()
    keys = [clean(key) for key in state]
    held = {clean(n): t for n, t in model.named_parameters(remove_duplicate=False)}
    held |= {clean(n): t for n, t in model.named_buffers(remove_duplicate=False)}
    return {key: held[key] for key in keys if key in held}

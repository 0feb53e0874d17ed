"""Whole dictionaries: what one process would save, from any topology and into any other."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from dmuon import _C
from dmuon.checkpoint import from_owner
from dmuon.errors import listed
from dmuon.names import clean
from dmuon.runtime import Runtime, runtime_of, runtime_of_whole


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
    runtime = runtime_of(model)
    runtime.engine.wait_publishes()
    dedicated = {name: param for param in runtime.params for name in param.names}
    receives = not rank0_only or runtime.global_rank == runtime.axes.job[0]
    held = _model_tensors(runtime)
    whole: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}  # name of each tensor: a tied one has several
    for key, value in runtime.model().state_dict().items():
        name = clean(key)
        mine = held.get(name, value)
        tied = first.setdefault(id(dedicated.get(name, mine)), name)
        if tied in whole:
            whole[name] = whole[tied]
            continue
        value = _master(dedicated[name]) if name in dedicated else runtime.front.whole(mine)
        whole[name] = snapshot(value, cpu_offload) if receives else None
    return whole if receives else {}


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
    as ``get_model_state_dict`` gives it; then tensors are sent one at a time. Under DeepSpeed a weight goes to the
    float32 copy of its optimizer as well as to the one that computes.

    Args:
        state_dict: whole tensors by the names of ``model.state_dict()``, any dtype, any device.

    Raises:
        ValueError: on all ranks, naming what is missing, unexpected or of another shape; a rank gave no
            dictionary while others did.
    """
    runtime = runtime_of_whole(model)
    held = _model_tensors(runtime)
    dedicated = {name: param for param in runtime.params for name in param.names}
    wanted = {name: _like(runtime, dedicated.get(name), mine) for name, mine in held.items()}
    shapes = {name: tuple(t.shape) for name, t in wanted.items()}
    what = "the model's state_dict"
    source = Source(runtime, state_dict, lambda given: misfits(what, given, shapes), what)
    for name, mine in held.items():
        value = source.given[name] if source.has_it else None
        value = source.take(value, wanted[name].shape, wanted[name].dtype, mine.device)
        if name in dedicated:
            runtime.set_value(dedicated[name], value)
        else:
            runtime.front.assign(mine, value)
    runtime.spread_values()
    runtime.engine.show_residents()


def _like(runtime: Runtime, param, mine: torch.Tensor) -> torch.Tensor:
    """On the meta device: what the whole dictionary has of it."""
    if param is None:
        return runtime.front.like(mine)
    return torch.empty(param.full_shape, dtype=param.dtype, device="meta")


def _model_tensors(runtime: Runtime) -> dict[str, torch.Tensor]:
    """What ``state_dict`` lists, with whole shapes: the parameters and buffers themselves."""
    model = runtime.model()
    # First: FSDP2 frees what a forward has left whole.
    keys = [clean(key) for key in model.state_dict()]
    held = {clean(n): t for n, t in model.named_parameters(remove_duplicate=False)}
    held |= {clean(n): t for n, t in model.named_buffers(remove_duplicate=False)}
    return {key: held[key] for key in keys if key in held}


class Source:
    """Where whole tensors come from: this rank's own dictionary, or that of the job's first rank."""

    def __init__(self, runtime: Runtime, given, problem: Callable[[Mapping], str], what: str):
        """Collective. ``problem(given)``: what does not fit, or nothing.

        Raises:
            ValueError: on all ranks, unless it fits on every rank, or on the first one and the others gave
                an empty dictionary.
        """
        self._runtime, self.given = runtime, given
        first = runtime.global_rank == runtime.axes.job[0]
        empty = isinstance(given, Mapping) and not given
        control = runtime.control
        self._sends = _all(control, empty or first) and not _all(control, empty)
        self.has_it = first or not self._sends
        text = _kind(what, given) or problem(given) if self.has_it else ""
        _C.agree(control.group_name, [], text)

    def take(self, value: torch.Tensor | None, shape, dtype: torch.dtype, device) -> torch.Tensor:
        """The whole tensor, on this rank. Collective where the first rank alone has ``value``."""
        if not self._sends:
            return value.detach()
        whole = torch.empty(tuple(shape), dtype=dtype, device=device)
        if self.has_it:
            whole.copy_(value)
        if whole.numel():
            dist.broadcast(whole, src=self._runtime.axes.job[0], group=self._runtime.job_group)
        return whole

    def tell(self, plain):
        """Plain data of the first rank's, on this rank. Collective where it alone has any."""
        if not self._sends:
            return plain
        told = [plain]
        dist.broadcast_object_list(told, src=self._runtime.axes.job[0], group=self._runtime.control)
        return told[0]


def _all(control, mine: bool) -> bool:
    flag = torch.tensor([int(mine)], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=control)
    return bool(flag.item())


def _kind(what: str, given) -> str:
    if not isinstance(given, Mapping):
        return (
            f"{what} is a {type(given).__name__}; it must be a dictionary of whole tensors by name."
        )
    if not given:
        return (
            f"{what} is empty on this rank and not on others. Give it on every rank, or on the job's first "
            "rank alone."
        )
    return ""


def misfits(what: str, given: Mapping, wanted: Mapping[str, tuple]) -> str:
    """What is missing, unexpected or of another shape, in one text; empty where all fits. A shape of None
    is not looked at."""
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    shapes = [
        f"{name!r} has {_shape(given[name])} and not {shape}"
        for name, shape in wanted.items()
        if shape is not None and name in given and _shape(given[name]) != shape
    ]
    parts = [f"missing: {listed(missing)}"] if missing else []
    parts += [f"unexpected: {listed(unexpected)}"] if unexpected else []
    parts += [f"of another shape: {'; '.join(shapes[:10])}"] if shapes else []
    return f"{what} does not fit, nothing was loaded. {'. '.join(parts)}." if parts else ""


def _shape(value) -> tuple | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__

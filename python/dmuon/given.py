"""What a user gives to be loaded: where it comes from, and whether it fits, before anything is written."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon.checkpoint import OwnedTensor
from dmuon.errors import listed
from dmuon.runtime import Runtime


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
        _C.agree(control.group_name, [], _fault(what, given, problem) if self.has_it else "")

    def take(self, value: torch.Tensor | None, like: torch.Tensor, device) -> torch.Tensor:
        """The whole tensor, on this rank. Collective where the first rank alone has ``value``.

        Args:
            like: its shape and dtype.
        """
        if not self._sends:
            return value.detach()
        whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        if self.has_it:
            whole.copy_(value)
        if whole.numel():  # as bytes: no backend knows every dtype
            src, group = self._runtime.axes.job[0], self._runtime.job_group
            dist.broadcast(whole.view(-1).view(torch.uint8), src=src, group=group)
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


def _fault(what: str, given, problem: Callable[[Mapping], str]) -> str:
    """Whatever it is: an exception on one rank would leave the others waiting."""
    try:
        return _kind(what, given) or problem(given)
    except Exception as error:
        return (
            f"{what} has not the form of one: {type(error).__name__}: {error}. Nothing was loaded."
        )


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


def misfits(what: str, given: Mapping, wanted: Mapping) -> str:
    """What is missing, unexpected, of another shape or not to be used, in one text; empty where all fits.

    Args:
        wanted: for each name a tensor whose shape it must have and whose dtype must be able to hold it; a shape
            alone; or None, where anything will do.
    """
    missing = [name for name in wanted if name not in given]
    unexpected = [name for name in given if name not in wanted]
    here = {name: want for name, want in wanted.items() if want is not None and name in given}
    shapes = [
        f"{name!r} has {_shape(given[name])} and not {_shape_of(want)}"
        for name, want in here.items()
        if _shape(given[name]) != _shape_of(want)
    ]
    faults = [(name, _unusable(given[name], want)) for name, want in here.items()]
    unusable = [f"{name!r} {fault}" for name, fault in faults if fault]
    parts = [f"missing: {listed(missing)}"] if missing else []
    parts += [f"unexpected: {listed(unexpected)}"] if unexpected else []
    parts += [f"of another shape: {'; '.join(shapes[:10])}"] if shapes else []
    parts += [f"not to be used: {'; '.join(unusable[:10])}"] if unusable else []
    return f"{what} does not fit, nothing was loaded. {'. '.join(parts)}." if parts else ""


def _shape(value) -> tuple | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__


def _shape_of(wanted) -> tuple:
    return tuple(wanted.shape) if isinstance(wanted, torch.Tensor) else wanted


def _unusable(value, wanted) -> str:
    """Why a tensor of the right shape cannot be loaded; empty where it can."""
    if not isinstance(value, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return ""
    if isinstance(value, (OwnedTensor, DTensor)):
        return (
            "is this rank's part of a tensor (what model.state_dict() gives, and model.load_state_dict takes); "
            "give whole ones"
        )
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = "on the meta device" if value.is_meta else str(value.layout)
        return f"is {'quantized' if value.is_quantized else kind}; give dense values"
    if not torch.can_cast(value.dtype, wanted.dtype):
        return f"is {value.dtype}, which {wanted.dtype} cannot hold"
    return ""

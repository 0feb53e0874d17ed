"""What goes wrong on one rank is raised on all."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch.distributed as dist

from dmuon import _C

T = TypeVar("T")


def together(control, call: Callable[[], T]) -> T:
    """What ``call`` gives; where it raises on any rank, all raise. Collective over ``control``; ``call``
    is not."""
    try:
        result = call()
    except Exception as error:
        raise_everywhere(control, error)
    _C.agree(control.group_name, [])
    return result


def raise_everywhere(control, error: Exception) -> NoReturn:
    """The other ranks hear of it: all raise a ValueError with the same text, this one from ``error``.

    Collective over ``control``: where this rank failed the others are in an agreement of theirs.
    """
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    try:
        _C.agree(control.group_name, [], text or type(error).__name__)
    except ValueError as everywhere:
        raise everywhere from error
    raise AssertionError("an agreement with an error agreed")


def is_first(runtime) -> bool:
    """Whether this is the job's first rank."""
    return runtime.global_rank == runtime.axes.job[0]


def on_every_rank(runtime, work: Callable[[], T]) -> T:
    """``together`` over the job of ``runtime``."""
    return together(runtime.control, work)


def on_first_rank(runtime, work: Callable) -> None:
    on_every_rank(runtime, work if is_first(runtime) else lambda: None)


def from_first_rank(runtime, work: Callable):
    """Its result there, on every rank."""
    told = [on_every_rank(runtime, work if is_first(runtime) else lambda: None)]
    dist.broadcast_object_list(told, src=runtime.axes.job[0], group=runtime.control)
    return told[0]

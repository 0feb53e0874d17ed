"""What ``save_checkpoint`` and ``load_checkpoint`` are given: checked on every rank, and the same on all."""

import operator
import os
from collections.abc import Callable
from pathlib import Path

from dmuon import _C, plain_data
from dmuon.agreement import on_every_rank
from dmuon.engine_optimizer import optimizer_of
from dmuon.runtime import Runtime


def agreed(runtime: Runtime, what: str, read: Callable[[], dict]) -> dict:
    """Arguments that must be the same on every rank, as ``read`` gives them, or the error it raises."""
    given = on_every_rank(runtime, read)
    _C.agree(
        runtime.control.group_name,
        [f"{key}\t{value!r}" for key, value in given.items()],
        subject=what,
        advice="Give the same arguments on every rank.",
    )
    return given


def checked_target(runtime: Runtime, directory, optimizer) -> dict:
    if not isinstance(directory, str | os.PathLike):
        raise ValueError(f"directory is {directory!r}; it must be a path.")
    if optimizer is not None:
        optimizer_of(runtime, optimizer)
    return {
        "directory": str(Path(directory)),
        "optimizer": "None" if optimizer is None else "given",
    }


def checked_step(step) -> int:
    if (whole := _whole_number(step)) is None or not 0 <= whole < 10**10:
        raise ValueError(f"step is {step!r}; it must be a whole number from 0 to 9999999999.")
    return whole


def checked_keep_last(keep_last) -> int | None:
    if keep_last is not None and (_whole_number(keep_last) or 0) < 1:
        raise ValueError(
            f"keep_last is {keep_last!r}; it must be a whole number of at least 1, or None."
        )
    return None if keep_last is None else operator.index(keep_last)


def _whole_number(value) -> int | None:
    """Of an integer of any kind."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def text_of(name: str, given) -> str:
    """As it is saved."""
    try:
        return plain_data.dumps(dict(given))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be saved: {error}. It is a dictionary of numbers, strings, None, lists, tuples, "
            "dictionaries and tensors."
        ) from error

"""Checkpoints that survive a crash at any moment, and load at any topology."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dmuon import _C, checkpoint_directory, manifest, plain_data
from dmuon.agreement import from_first_rank, is_first, on_every_rank, on_first_rank
from dmuon.checkpoint_arguments import (
    agreed,
    checked_keep_last,
    checked_step,
    checked_target,
    text_of,
)
from dmuon.checkpoint_directory import committed, is_checkpoint, path_of, step_of
from dmuon.checkpoint_fit import EXTRA, fitted, tensors_of
from dmuon.distributed_state import State
from dmuon.extra_state import is_extra
from dmuon.optimizer import Muon
from dmuon.runtime import Runtime, runtime_of_whole
from dmuon.safe_storage import Reader, Writer
from dmuon.states import plain_settings
from dmuon.tensor_parallel import local_part


@dataclass(frozen=True)
class Checkpoint:
    """What ``load_checkpoint`` has loaded: its ``step``, its ``path``, and ``extra`` as it was saved, the same
    on every rank; ``rank_extra`` of this rank, None where it has none. Local, plain data."""

    step: int
    path: str
    extra: dict
    rank_extra: dict | None = None


def save_checkpoint(
    directory: str | os.PathLike,
    step: int,
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    extra: Mapping | None = None,
    rank_extra: Mapping | None = None,
    keep_last: int | None = None,
) -> str:
    """Write ``<directory>/step_<step>``. Every rank writes what it owns.

    It is written beside, with checksums, forced to disk and renamed as a whole: a process that is killed at any
    moment leaves the checkpoints that were there before, and this one or nothing of it. Collective over the job.

    Args:
        directory: on a file system that all ranks share. Made where it is missing. One job at a time saves
            there: it holds a lock meanwhile, which the kernel releases when it dies.
        step: at least 0, at most 9999999999; the checkpoint's name.
        optimizer: None: weights and buffers alone.
        extra: what else to save, plain data and small tensors: ``{"scheduler": scheduler.state_dict()}``. The
            job's first rank's counts. At most 4 MiB of tensors.
        rank_extra: the same of each rank, such as the state of its random number generators; or None.
        keep_last: afterwards remove all but this many of those committed last, and never this one.

    Returns:
        The checkpoint's path.

    Raises:
        ValueError: on all ranks: that step is there already; an argument is out of range, or not the same on
            every rank.
        RuntimeError: on all ranks: another job saves there; writing failed on one of them, with its reason. What
            was there before is there still, and training can go on.
    """
    runtime = runtime_of_whole(model)
    given = agreed(
        runtime,
        "save the same checkpoint",
        lambda: (
            checked_target(runtime, directory, optimizer)
            | {"step": checked_step(step), "keep_last": checked_keep_last(keep_last)}
        ),
    )
    texts, state = on_every_rank(
        runtime, lambda: _texts_and_state(extra, rank_extra, model, optimizer)
    )
    final = path_of(Path(given["directory"]), given["step"])
    part = from_first_rank(runtime, lambda: checkpoint_directory.new_part(final))
    first = is_first(runtime)
    with contextlib.ExitStack() as stack:
        claim = checkpoint_directory.claimed(part)
        _carry_out(runtime, part, lambda: stack.enter_context(claim) if first else None)
        _carry_out(runtime, part, lambda: _write(runtime, part, given["step"], state, texts))
        _carry_out(
            runtime, part, lambda: checkpoint_directory.commit(part, final) if first else None
        )
        if keep_last is not None:
            on_first_rank(
                runtime, lambda: checkpoint_directory.remove_old(final, given["keep_last"])
            )
    return str(final)


@dataclass(frozen=True)
class _Texts:
    """What is no tensor, as it is saved."""

    extra: str
    of_rank: str | None
    of_modules: dict[str, str]


def _texts_and_state(extra, rank_extra, model, optimizer) -> tuple[_Texts, State]:
    of_rank = None if rank_extra is None else text_of("rank_extra", rank_extra)
    state = State(model, optimizer)
    kept = {key: value for key, value in state["model"].items() if is_extra(key)}
    of_modules = {key: text_of(key, {"value": value}) for key, value in kept.items()}
    return _Texts(text_of("extra", extra or {}), of_rank, of_modules), state


def _write(runtime: Runtime, part: Path, step: int, state: State, texts: _Texts) -> None:
    writer = Writer(part)
    tensors = tensors_of(state)
    if texts.of_rank is not None:
        tensors[_of_rank(runtime)] = _as_tensor(texts.of_rank)
    if is_first(runtime):
        tensors |= {EXTRA + key: _as_tensor(text) for key, text in texts.of_modules.items()}
    dcp.save(tensors, storage_writer=writer, process_group=runtime.control)
    if is_first(runtime):
        groups = state.get("optim", {}).get("param_groups", {})
        content = {
            "step": step,
            "ranks": len(runtime.axes.job),
            "tensors": writer.tensors,
            "groups": plain_data.dumps(
                {name: plain_settings(group) for name, group in groups.items()}
            ),
            "extra": texts.extra,
            "files": writer.files,
        }
        manifest.write_manifest(part, content, checkpoint_directory.next_order(part.parent))


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)


def _of_rank(runtime: Runtime) -> str:
    return f"rank_extra.{runtime.axes.job.index(runtime.global_rank)}"


def _carry_out(runtime: Runtime, part: Path, work: Callable[[], object]) -> None:
    """One part of a save: where it fails on a rank, all raise, and nothing is left of it."""
    problem = ""
    try:
        work()
    except (Exception, CheckpointException) as error:
        problem = f"saving {part.parent} failed: {_reason(error)}. Nothing that was there before has changed."
    try:
        _C.agree(runtime.control.group_name, [], problem)
    except ValueError as error:
        on_first_rank(runtime, lambda: checkpoint_directory.remove(part))
        raise RuntimeError(str(error)) from None


def _reason(error: BaseException) -> str:
    """The first cause; torch wraps each rank's."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items(), key=lambda item: item[0])
        return f"{_reason(cause)} (rank {rank})"
    return str(error) or type(error).__name__


def load_checkpoint(
    directory: str | os.PathLike,
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    step: int | None = None,
) -> Checkpoint:
    """Load what ``save_checkpoint`` has written, on any number of ranks, mesh and runtime.

    Every file is checked before the first tensor is read, and every name, shape, dtype and setting before the
    first is written. No pickle is executed. AdamW's state of a parameter that was frozen starts anew, state of one
    that is frozen now is left out. Collective over the job.

    Args:
        directory: that of ``save_checkpoint``, or the path of one checkpoint, as that returns it.
        optimizer: None: weights and buffers alone.
        step: None: that which was committed last.

    Returns:
        What was loaded, with ``extra``; with ``rank_extra`` where this job has as many ranks as that one.

    Raises:
        ValueError: on all ranks: there is none; an argument is out of range, or not the same on every rank; a
            file is damaged, with its name and the newest step that is whole; what does not fit.
    """
    runtime = runtime_of_whole(model)
    given = agreed(
        runtime,
        "load the same checkpoint",
        lambda: (
            checked_target(runtime, directory, optimizer)
            | {"step": None if step is None else checked_step(step)}
        ),
    )
    root = Path(given["directory"])
    path, others = from_first_rank(runtime, lambda: _chosen(root, given["step"]))
    content = _sound(runtime, path, others)
    dedicated = {param.param_name for param in runtime.params}

    def fit():
        state = State(model, optimizer)
        reader = Reader(path, content)
        return (
            state,
            reader,
            fitted(path, content, state, dedicated),
            _of_this_rank(runtime, content, reader),
            _of_modules(state, reader),
        )

    state, reader, (tensors, anew), rank_extra, of_modules = on_every_rank(runtime, fit)
    dcp.load(tensors, storage_reader=reader, process_group=runtime.control)
    for tensor in anew:
        local_part(tensor).detach().zero_()
    if optimizer is not None:
        state["optim"]["param_groups"] = plain_data.loads(content["groups"])
    state["model"] |= of_modules
    state.load_state_dict(state)
    return Checkpoint(content["step"], str(path), plain_data.loads(content["extra"]), rank_extra)


def _chosen(root: Path, step: int | None) -> tuple[Path, list[Path]]:
    """And the others there, the last one committed first."""
    there = committed(root)
    if not there and is_checkpoint(root):
        return _itself(root, step), []
    if not there:
        raise ValueError(f"{root} has no checkpoint.")
    path = there[0] if step is None else path_of(root, step)
    if path not in there:
        steps = ", ".join(str(step_of(other)) for other in there)
        raise ValueError(f"{root} has no checkpoint of step {step}; it has {steps}.")
    return path, [other for other in there if other != path]


def _itself(path: Path, step: int | None) -> Path:
    if step is not None:
        raise ValueError(
            f"{path} is a checkpoint itself. Give it alone, or step= and the directory above."
        )
    return path


def _sound(runtime: Runtime, path: Path, others: list[Path]) -> dict:
    """The manifest of a checkpoint that is whole. Collective."""
    try:
        return _checked(runtime, path)
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"{problem} {_offer(runtime, others)}")


def _offer(runtime: Runtime, others: list[Path]) -> str:
    for other in others:
        with contextlib.suppress(ValueError):
            _checked(runtime, other)
            step = step_of(other)
            return f"The newest checkpoint that is whole is of step {step}: load_checkpoint(..., step={step})."
    return "No other checkpoint there is whole."


def _checked(runtime: Runtime, path: Path) -> dict:
    """The ranks share the files out."""
    content = from_first_rank(runtime, lambda: manifest.read_manifest(path))
    ranks = runtime.axes.job
    files = sorted(content["files"])[ranks.index(runtime.global_rank) :: len(ranks)]
    on_every_rank(runtime, lambda: _verify(path, content, files))
    return content


def _verify(path: Path, content: Mapping, files: list[str]) -> None:
    if problem := manifest.damage(path, content, files):
        raise ValueError(problem)


def _of_modules(state: State, reader: Reader) -> dict:
    keys = [key for key in state["model"] if is_extra(key)]
    return {key: plain_data.loads(reader.bytes_of(EXTRA + key).decode())["value"] for key in keys}


def _of_this_rank(runtime: Runtime, content: Mapping, reader: Reader) -> dict | None:
    name = _of_rank(runtime)
    if content["ranks"] != len(runtime.axes.job) or name not in content["tensors"]:
        return None
    return plain_data.loads(reader.bytes_of(name).decode())

"""Checkpoints that survive a crash at any moment, and load at any topology."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dmuon import _C, manifest, plain_data
from dmuon.agreement import from_first_rank, is_first, on_every_rank, on_first_rank
from dmuon.distributed_state import State
from dmuon.full_state import misfits
from dmuon.optimizer import Muon
from dmuon.runtime import Runtime, runtime_of_whole
from dmuon.safe_storage import Reader, Writer

_NAME = re.compile(r"step_(\d{10})")
_LEFT = re.compile(r"\.step_\d{10}\.(part|old)")


@dataclass(frozen=True)
class Checkpoint:
    """What ``load_checkpoint`` has loaded: its ``step``, its ``path``, and ``extra`` as it was saved. The
    same on every rank; local, plain data."""

    step: int
    path: str
    extra: dict


def save_checkpoint(
    directory: str | os.PathLike,
    step: int,
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    extra: Mapping | None = None,
    keep_last: int | None = None,
) -> str:
    """Write ``<directory>/step_<step>``. Every rank writes what it owns.

    It is written beside, with checksums, forced to disk and renamed as a whole: a process that is killed at any
    moment leaves the checkpoints that were there before, and this one or nothing of it. Collective over the job.

    Args:
        directory: on a file system that all ranks share. Made where it is missing.
        step: at least 0, at most 9999999999; the checkpoint's name.
        optimizer: None: weights and buffers alone.
        extra: what else to save, plain data: ``{"scheduler": scheduler.state_dict()}``. The job's first rank's
            counts.
        keep_last: afterwards remove all but this many of the newest checkpoints, and never this one.

    Returns:
        The checkpoint's path.

    Raises:
        ValueError: on all ranks: that step is there already; an argument is out of range, or not the same on
            every rank.
        RuntimeError: on all ranks: writing failed on one of them, with its reason. What was there before is
            there still, and training can go on.
    """
    runtime = runtime_of_whole(model)
    text = on_every_rank(runtime, lambda: _checked(step, extra, keep_last))
    _agree_on(runtime, directory, step, keep_last)
    root = Path(directory)
    final, part = _paths(root, step)
    on_first_rank(runtime, lambda: _check_free(final))
    _carry_out(runtime, part, lambda: _make_room(root, part) if is_first(runtime) else None)
    state = State(model, optimizer)
    _carry_out(runtime, part, lambda: _write(runtime, part, step, state, text))
    _carry_out(runtime, part, lambda: _commit(part, final) if is_first(runtime) else None)
    if keep_last is not None and is_first(runtime):
        _remove_old(final, keep_last)
    return str(final)


def _paths(root: Path, step: int) -> tuple[Path, Path]:
    name = f"step_{step:010d}"
    return root / name, root / f".{name}.part"


def _checked(step, extra, keep_last) -> str:
    """``extra`` as it is saved."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**10:
        raise ValueError(f"step is {step!r}; it must be a whole number from 0 to 9999999999.")
    whole = isinstance(keep_last, int) and not isinstance(keep_last, bool)
    if keep_last is not None and not (whole and keep_last >= 1):
        raise ValueError(
            f"keep_last is {keep_last!r}; it must be a whole number of at least 1, or None."
        )
    try:
        return plain_data.dumps(dict(extra or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra is not plain data: {error}. Tensors belong to the model's buffers."
        ) from error


def _agree_on(runtime: Runtime, directory, step: int, keep_last: int | None) -> None:
    given = {"directory": os.fspath(directory), "step": step, "keep_last": keep_last}
    _C.agree(
        runtime.control.group_name,
        [f"{key}\t{value}" for key, value in given.items()],
        subject="save the same checkpoint",
        advice="Give the same arguments on every rank.",
    )


def _check_free(final: Path) -> None:
    if os.path.lexists(final):
        raise ValueError(f"{final} is there already. Remove it, or save another step.")


def _make_room(root: Path, part: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for left in root.iterdir():  # of saves that did not end
        if _LEFT.fullmatch(left.name):
            shutil.rmtree(left)
    part.mkdir()


def _write(runtime: Runtime, part: Path, step: int, state: State, extra: str) -> None:
    writer = Writer(part)
    dcp.save(_tensors(state), storage_writer=writer, process_group=runtime.control)
    if is_first(runtime):
        groups = state.get("optim", {}).get("param_groups", {})
        content = {
            "step": step,
            "ranks": len(runtime.global_ranks),
            "tensors": writer.tensors,
            "groups": plain_data.dumps({name: _plain(group) for name, group in groups.items()}),
            "extra": extra,
            "files": writer.files,
        }
        manifest.write_manifest(part, content)


def _plain(group: Mapping) -> dict:
    """A learning rate may be a tensor."""
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items()}


def _commit(part: Path, final: Path) -> None:
    os.rename(part, final)
    manifest.sync(final.parent)


def _remove_old(saved: Path, keep_last: int) -> None:
    """What cannot be removed stays, and the next save tries again."""
    for path in _committed(saved.parent)[keep_last:]:
        if path != saved:
            with contextlib.suppress(OSError):
                doomed = path.with_name(f".{path.name}.old")
                os.rename(path, doomed)
                shutil.rmtree(doomed)


def _committed(root: Path) -> list[Path]:
    """Newest first."""
    found = [p for p in root.iterdir() if _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, reverse=True)


def newest_step(directory: str | os.PathLike) -> int | None:
    """The step of the newest complete checkpoint there, if there is any. Local."""
    found = _committed(Path(directory))
    return int(_NAME.fullmatch(found[0].name)[1]) if found else None


def _tensors(state: Mapping) -> dict[str, torch.Tensor]:
    flat = {f"model.{name}": t for name, t in state["model"].items()}
    for name, entry in state.get("optim", {}).get("state", {}).items():
        flat |= {f"optim.{name}.{key}": t for key, t in entry.items()}
    return flat


def load_checkpoint(
    directory: str | os.PathLike,
    model: nn.Module,
    optimizer: Muon | None = None,
    *,
    step: int | None = None,
) -> Checkpoint:
    """Load what ``save_checkpoint`` has written, on any number of ranks, mesh and runtime.

    Every file is checked before the first tensor is read, and every name and shape before the first is
    written. No pickle is executed. Collective over the job.

    Args:
        directory: that of ``save_checkpoint``.
        optimizer: None: weights and buffers alone.
        step: None: the newest.

    Returns:
        What was loaded, with ``extra``.

    Raises:
        ValueError: on all ranks: there is none; a file is damaged, with its name and the newest step that is
            whole; what does not fit.
    """
    runtime = runtime_of_whole(model)
    root = Path(directory)
    path, content = from_first_rank(runtime, lambda: _chosen(root, step))
    on_every_rank(runtime, lambda: _verify(runtime, root, path, content))
    state = State(model, optimizer)
    tensors = _tensors(state)
    on_every_rank(runtime, lambda: _check_fit(path, content, tensors, state))
    reader = Reader(path, content)
    dcp.load(tensors, storage_reader=reader, process_group=runtime.control)
    if optimizer is not None:
        state["optim"]["param_groups"] = plain_data.loads(content["groups"])
    state.load_state_dict(state)
    return Checkpoint(content["step"], str(path), plain_data.loads(content["extra"]))


def _chosen(root: Path, step: int | None) -> tuple[Path, dict]:
    there = _committed(root)
    if not there:
        raise ValueError(f"{root} has no checkpoint.")
    path = there[0] if step is None else _paths(root, step)[0]
    if path not in there:
        raise ValueError(
            f"{root} has no checkpoint of step {step}; it has {', '.join(map(_step_of, there))}."
        )
    try:
        return path, manifest.read_manifest(path)
    except ValueError as error:
        raise ValueError(f"{error}{_offer(root, path)}") from error


def _step_of(path: Path) -> str:
    return str(int(_NAME.fullmatch(path.name)[1]))


def _verify(runtime: Runtime, root: Path, path: Path, content: Mapping) -> None:
    """The ranks share the files out."""
    ranks = runtime.axes.job
    mine = sorted(content["files"])[ranks.index(runtime.global_rank) :: len(ranks)]
    problem = next(filter(None, (manifest.damage(path, content, name) for name in mine)), "")
    if problem:
        raise ValueError(f"{problem}{_offer(root, path)}")


def _offer(root: Path, bad: Path) -> str:
    for path in _committed(root):
        if path != bad and _is_whole(path):
            return f" The newest checkpoint that is whole is of step {_step_of(path)}: load_checkpoint(..., step={_step_of(path)})."
    return " No other checkpoint there is whole."


def _is_whole(path: Path) -> bool:
    try:
        content = manifest.read_manifest(path)
    except ValueError:
        return False
    return not any(manifest.damage(path, content, name) for name in content["files"])


def _check_fit(path: Path, content: Mapping, tensors: Mapping, state: Mapping) -> None:
    wanted = {name: tuple(t.size()) for name, t in tensors.items()}
    if "optim" not in state:
        saved = {n: t for n, t in content["tensors"].items() if n.startswith("model.")}
    else:
        saved = content["tensors"]
    given = {name: torch.empty(tensor["size"], device="meta") for name, tensor in saved.items()}
    problem = misfits(str(path), given, wanted)
    saved_groups = plain_data.loads(content["groups"])
    groups = state.get("optim", {}).get("param_groups", {})
    missing = [name for name in groups if name not in saved_groups]
    if missing and not problem:
        problem = f"{path} has no param group {missing[0]!r}; it has {', '.join(saved_groups)}."
    if problem:
        raise ValueError(problem)


def _carry_out(runtime: Runtime, part: Path, work: Callable[[], None]) -> None:
    """One part of a save: where it fails on a rank, all raise, and nothing is left of it."""
    problem = ""
    try:
        work()
    except (Exception, CheckpointException) as error:
        problem = f"saving {part.parent} failed: {_reason(error)}. Nothing that was there before has changed."
    try:
        _C.agree(runtime.control.group_name, [], problem)
    except ValueError as error:
        if is_first(runtime):
            shutil.rmtree(part, ignore_errors=True)
        raise RuntimeError(str(error)) from None


def _reason(error: BaseException) -> str:
    """The first cause; torch wraps each rank's."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items(), key=lambda item: item[0])
        return f"{cause} (rank {rank})"
    return str(error) or type(error).__name__

"""Checkpoints that survive a crash at any moment, and load at any topology."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dmuon import _C, safe_storage
from dmuon.distributed_state import State
from dmuon.full_state import misfits
from dmuon.optimizer import Muon
from dmuon.runtime import Runtime, runtime_of_whole

_NAME = re.compile(r"step_(\d{10})")


@dataclass(frozen=True)
class Checkpoint:
    """What ``load_checkpoint`` has loaded."""

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
        step: at least 0; the checkpoint's name.
        extra: what else to save, as JSON: ``{"scheduler": scheduler.state_dict()}``.
        keep_last: afterwards remove all but this many of the newest checkpoints.

    Returns:
        The checkpoint's path.

    Raises:
        ValueError: on all ranks: that step is there already; an argument is out of range.
        RuntimeError: on all ranks: writing failed on one of them, with its reason. What was there before is
            there still, and training can go on.
    """
    runtime = runtime_of_whole(model)
    root = Path(directory)
    final, part = _paths(root, step)
    text = _on_every_rank(runtime, lambda: _check(step, extra, keep_last))
    _on_first_rank(runtime, lambda: _make_room(root, final, part))
    state = State(model, optimizer)
    writer = safe_storage.JsonWriter(part)
    _carry_out(
        runtime,
        step,
        lambda: dcp.save(_tensors(state), storage_writer=writer, process_group=runtime.control),
    )
    mine = _carry_out(
        runtime, step, lambda: {f: safe_storage.fingerprint(part / f) for f in sorted(writer.files)}
    )
    files = _gathered(runtime, mine)
    content = {
        "format": safe_storage.FORMAT,
        "step": step,
        "ranks": len(runtime.global_ranks),
        "tensors": writer.tensors,
        "groups": state.get("optim", {}).get("param_groups", {}),
        "extra": json.loads(text),
        "files": files,
    }
    _carry_out(runtime, step, lambda: _commit(runtime, part, final, content, keep_last))
    return str(final)


def _paths(root: Path, step) -> tuple[Path, Path]:
    name = f"step_{int(step):010d}"
    return root / name, root / f".{name}.part"


def _check(step, extra, keep_last) -> str:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**10:
        raise ValueError(f"step is {step!r}; it must be a whole number from 0 to 9999999999.")
    if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(
            f"keep_last is {keep_last!r}; it must be a whole number of at least 1, or None."
        )
    try:
        return json.dumps(dict(extra or {}))
    except TypeError as error:
        raise ValueError(
            f"extra is not JSON: {error}. Tensors belong to the model's buffers."
        ) from error


def _make_room(root: Path, final: Path, part: Path) -> None:
    if final.exists():
        raise ValueError(f"{final} is there already. Remove it, or save another step.")
    root.mkdir(parents=True, exist_ok=True)
    if part.exists():  # of a save that did not end
        shutil.rmtree(part)
    part.mkdir()


def _commit(
    runtime: Runtime, part: Path, final: Path, content: dict, keep_last: int | None
) -> None:
    if not _is_first(runtime):
        return
    safe_storage.write_manifest(part, content)
    os.rename(part, final)
    safe_storage.sync(final.parent)
    for path in _committed(final.parent)[keep_last:] if keep_last else ():
        doomed = path.with_name(f".{path.name}.old")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _committed(root: Path) -> list[Path]:
    """Newest first."""
    found = [p for p in root.iterdir() if _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, reverse=True)


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
        step: None: the newest.

    Raises:
        ValueError: on all ranks: there is none; a file is damaged, with its name and the newest step that is
            whole; what does not fit.
    """
    runtime = runtime_of_whole(model)
    root = Path(directory)
    path, manifest = _from_first_rank(runtime, lambda: _chosen(root, step))
    _on_every_rank(runtime, lambda: _verify(runtime, root, path, manifest))
    state = State(model, optimizer)
    tensors = _tensors(state)
    _on_every_rank(runtime, lambda: _check_fit(path, manifest, tensors, state))
    reader = safe_storage.JsonReader(path, manifest)
    dcp.load(tensors, storage_reader=reader, process_group=runtime.control)
    if optimizer is not None:
        state["optim"]["param_groups"] = manifest["groups"]
    state.load_state_dict(state)
    return Checkpoint(manifest["step"], str(path), manifest["extra"])


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
        return path, safe_storage.read_manifest(path)
    except ValueError as error:
        raise ValueError(f"{error}{_offer(root, path)}") from error


def _step_of(path: Path) -> str:
    return str(int(_NAME.fullmatch(path.name)[1]))


def _verify(runtime: Runtime, root: Path, path: Path, manifest: Mapping) -> None:
    """The ranks share the files out."""
    ranks = runtime.axes.job
    mine = sorted(manifest["files"])[ranks.index(runtime.global_rank) :: len(ranks)]
    problem = next(filter(None, (safe_storage.damage(path, manifest, name) for name in mine)), "")
    if problem:
        raise ValueError(f"{problem}{_offer(root, path)}")


def _offer(root: Path, bad: Path) -> str:
    for path in _committed(root):
        if path != bad and _is_whole(path):
            return f" The newest checkpoint that is whole is of step {_step_of(path)}: load_checkpoint(..., step={_step_of(path)})."
    return " No other checkpoint there is whole."


def _is_whole(path: Path) -> bool:
    try:
        manifest = safe_storage.read_manifest(path)
    except ValueError:
        return False
    return not any(safe_storage.damage(path, manifest, name) for name in manifest["files"])


def _check_fit(path: Path, manifest: Mapping, tensors: Mapping, state: Mapping) -> None:
    wanted = {name: tuple(t.size()) for name, t in tensors.items()}
    if "optim" not in state:
        saved = {n: t for n, t in manifest["tensors"].items() if n.startswith("model.")}
    else:
        saved = manifest["tensors"]
    given = {name: torch.empty(tensor["size"], device="meta") for name, tensor in saved.items()}
    problem = misfits(str(path), given, wanted)
    missing = [
        g for g in state.get("optim", {}).get("param_groups", {}) if g not in manifest["groups"]
    ]
    if problem or missing:
        raise ValueError(
            problem
            or f"{path} has no param group {missing[0]!r}; it has {', '.join(manifest['groups'])}."
        )


# What one rank meets is everybody's.


def _is_first(runtime: Runtime) -> bool:
    return runtime.global_rank == runtime.axes.job[0]


def _on_every_rank(runtime: Runtime, work):
    """Its result, or on all ranks the ValueError of the ranks that raised one."""
    result, problem = None, ""
    try:
        result = work()
    except (ValueError, OSError) as error:
        problem = str(error)
    _C.agree(runtime.control.group_name, [], problem)
    return result


def _on_first_rank(runtime: Runtime, work) -> None:
    _on_every_rank(runtime, work if _is_first(runtime) else lambda: None)


def _from_first_rank(runtime: Runtime, work):
    result = _on_every_rank(runtime, work if _is_first(runtime) else lambda: None)
    told = [result]
    dist.broadcast_object_list(told, src=runtime.axes.job[0], group=runtime.control)
    return told[0]


def _carry_out(runtime: Runtime, step: int, work):
    """One part of a save: where it fails on a rank, all raise."""
    result, problem = None, ""
    try:
        result = work()
    except Exception as error:
        problem = f"saving step {step} failed: {_reason(error)}. Nothing that was there before has changed."
    try:
        _C.agree(runtime.control.group_name, [], problem)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
    return result


def _reason(error: BaseException) -> str:
    """The first cause; torch wraps each rank's."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"{cause} (rank {rank})"
    return str(error) or type(error).__name__


def _gathered(runtime: Runtime, mine: dict) -> dict:
    """Everybody's, on the job's first rank; elsewhere nothing."""
    everyone = [None] * len(runtime.axes.job) if _is_first(runtime) else None
    dist.gather_object(mine, everyone, dst=runtime.axes.job[0], group=runtime.control)
    return {key: value for one in everyone or () for key, value in one.items()}

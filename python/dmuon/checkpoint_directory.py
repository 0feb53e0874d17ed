"""The life of a directory of checkpoints: who may save there, what is there and in which order, and what is
removed. Local: what of it is done, the job's first rank does."""

import contextlib
import fcntl
import functools
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from dmuon import manifest

_NAME = re.compile(r"step_(\d{10})")
_LEFT = re.compile(r"\.step_\d{10}(\.[0-9a-f]{8})?\.(part|old)")
_LOCK = ".lock"


def path_of(root: Path, step: int) -> Path:
    return root / f"step_{step:010d}"


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def new_part(final: Path) -> Path:
    """Where it is written; no other save has this name.

    Raises:
        ValueError: ``final`` is there already.
    """
    _check_free(final)
    return _hidden(final, "part")


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")


def _check_free(final: Path) -> None:
    if is_checkpoint(final.parent):
        raise ValueError(f"{final.parent} is a checkpoint itself. Give the directory above it.")
    if os.path.lexists(final):
        raise ValueError(
            f"{final} is there already, from before or from a run that went back to an older step. Remove it, "
            "save another step, or save to another directory."
        )


# What is there ---------------------------------------------------------------------------------


def committed(root: Path) -> list[Path]:
    """The last one committed first. One whose marker cannot be read may be that, and comes before it."""
    known, unknown = _ordered(root)
    return unknown + known


def _ordered(root: Path) -> tuple[list[Path], list[Path]]:
    """Those whose place is known, the last one first, and the others."""
    found = [p for p in root.iterdir() if _NAME.fullmatch(p.name)] if root.is_dir() else []
    orders, unknown = {}, []
    for path in sorted(found, reverse=True):
        try:
            orders[path] = manifest.order_of(path)
        except ValueError:
            if os.path.lexists(path):  # else another job has just removed it
                unknown.append(path)
    return sorted(orders, key=orders.get, reverse=True), unknown


def next_order(root: Path) -> int:
    known, _ = _ordered(root)
    return manifest.order_of(known[0]) + 1 if known else 1


def newest_step(directory: str | os.PathLike) -> int | None:
    """The step of the checkpoint that was committed last, if there is any. Local."""
    found = committed(Path(directory))
    return step_of(found[0]) if found else None


def is_checkpoint(path: Path) -> bool:
    """Whether this is one, perhaps damaged, and not a directory of them, which may have a file of such a name."""
    there = [os.path.lexists(path / name) for name in (manifest.MANIFEST, manifest.MARKER)]
    return all(there) or (any(there) and _NAME.fullmatch(path.name) is not None)


# Who may save ----------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed(part: Path) -> Iterator[None]:
    """``part`` is made, and no other job saves there meanwhile.

    Raises:
        RuntimeError: another one does.
    """
    root = part.parent
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root) as alone:
        if alone:  # what is there then is of saves that did not end
            for left in root.iterdir():
                if _LEFT.fullmatch(left.name):
                    remove(left)
        part.mkdir()
        yield


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Whether nobody else can save there. The kernel unlocks what a killed process had."""
    with contextlib.ExitStack() as stack:
        try:
            handle = _opened(root / _LOCK)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not by closing it: a process forked meanwhile has it open too.
            stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
            alone = True
        except BlockingIOError:
            raise RuntimeError(
                f"another job is saving there, it holds {root / _LOCK}. End it, or save to another directory"
            ) from None
        except OSError as error:
            _warn_unlocked(root, str(error.strerror))
            alone = False
        yield alone


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's
        return os.open(path, os.O_RDONLY)


@functools.cache
def _warn_unlocked(root: Path, reason: str) -> None:
    warnings.warn(
        f"dmuon.save_checkpoint cannot lock {root / _LOCK} ({reason}). Let one job at a time save there, and "
        f"remove what killed ones leave, {root}/.step_*, by hand.",
        stacklevel=2,
    )


# What goes -------------------------------------------------------------------------------------


def commit(part: Path, final: Path) -> None:
    os.rename(part, final)
    manifest.sync(final.parent)


def remove(path: Path) -> None:
    """A link, not what it leads to. What cannot be removed is left."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_old(saved: Path, keep_last: int) -> None:
    """All but ``keep_last`` and those whose place is not known. What cannot be removed is left."""
    with contextlib.suppress(OSError):
        for path in _ordered(saved.parent)[0][keep_last:]:
            if path != saved:
                with contextlib.suppress(OSError):
                    doomed = _hidden(path, "old")
                    os.rename(path, doomed)
                    remove(doomed)

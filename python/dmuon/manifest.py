"""What a checkpoint holds and where, as JSON beside its data files, and the marker that commits it: the
manifest's SHA-256. What is not committed is not there."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from dmuon import plain_data
from dmuon.safe_storage import DataFile, bytes_of

MANIFEST, MARKER = "manifest.json", "COMMIT"
FORMAT = 1
_KEYS = {"format", "step", "ranks", "tensors", "groups", "extra", "files"}


def write_manifest(directory: Path, content: Mapping) -> None:
    """With its marker; both are on disk when this returns."""
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True).encode()
    _write(directory / MANIFEST, text)
    _write(directory / MARKER, hashlib.sha256(text).hexdigest().encode())
    sync(directory)


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """What was made or renamed in it is on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(directory: Path) -> dict:
    """Raises ValueError naming the file that is missing, damaged or not ours, and what is wrong in it."""
    path = directory / MANIFEST
    text = _read(path)
    marker = _read(directory / MARKER).decode(errors="replace").strip()
    if hashlib.sha256(text).hexdigest() != marker:
        raise ValueError(f"{path} or {MARKER} beside it is damaged: their checksums differ.")
    try:
        manifest = json.loads(text)
        problem = _problem(directory, manifest)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"is no manifest of a checkpoint: {error!r}"
    if problem:
        raise ValueError(f"{path} {problem}.")
    return manifest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error


def _problem(directory: Path, manifest: Mapping) -> str:
    """The first thing that is wrong; empty where nothing is."""
    if manifest.get("format") != FORMAT:
        return f"has format {manifest.get('format')!r}; this dmuon reads {FORMAT}"
    if set(manifest) != _KEYS:
        return f"has the keys {sorted(manifest)}; it must have {sorted(_KEYS)}"
    int(manifest["step"]), plain_data.loads(manifest["groups"]), plain_data.loads(manifest["extra"])
    problems = (_file_problem(directory, name) for name in manifest["files"])
    problems = [*problems, *(_tensor_problem(*item) for item in manifest["tensors"].items())]
    return next(filter(None, problems), "") or _gap(manifest)


def _file_problem(directory: Path, name: str) -> str:
    """A manifest names files beside it, nothing else."""
    inside = name and Path(name).name == name and name not in (".", "..") and "\0" not in name
    if inside and not (directory / name).is_symlink():
        return ""
    return f"names {name!r}, which is not a file of its directory"


def _tensor_problem(name: str, tensor: Mapping) -> str:
    if not isinstance(getattr(torch, tensor["dtype"], None), torch.dtype):
        return f"gives {name!r} the dtype {tensor['dtype']!r}, which torch has not"
    size, chunks = tensor["size"], tensor["chunks"]
    inside = all(
        len(c["offsets"]) == len(c["sizes"]) == len(size)
        and all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(c["offsets"], c["sizes"], size))
        for c in chunks
    )
    distinct = len({tuple(c["offsets"]) for c in chunks}) == len(chunks)
    if inside and distinct and sum(math.prod(c["sizes"]) for c in chunks) == math.prod(size):
        return ""
    return f"has pieces of {name!r} that do not make up {tuple(size)}"


def _gap(manifest: Mapping) -> str:
    """The pieces fill the files: every byte is known, and has a checksum."""
    filled = dict.fromkeys(manifest["files"], 0)
    for file, at, length, name, _ in _pieces(manifest):
        if file not in filled:
            return f"has {name!r} in {file!r}, which it does not list"
        if at != filled[file]:
            return f"has {name!r} at {at} of {file!r}, and not at {filled[file]}"
        filled[file] += length
    short = [file for file, size in manifest["files"].items() if size != filled[file]]
    return f"has other bytes in {short[0]!r} than its tensors" if short else ""


def _pieces(manifest: Mapping) -> Iterator[tuple[str, int, int, str, int]]:
    """(file, at, bytes, name, checksum), as they lie."""
    found = []
    for name, tensor in manifest["tensors"].items():
        dtype = getattr(torch, tensor["dtype"])
        for c in tensor["chunks"]:
            length = bytes_of(c["sizes"], dtype)
            found.append((c["file"], c["at"], length, name, c["checksum"]))
    return iter(sorted(found))


def damage(directory: Path, manifest: Mapping, file: str) -> str:
    """What is wrong with a data file; empty where nothing is."""
    path, wanted = directory / file, manifest["files"][file]
    try:
        size = path.stat().st_size
        if size != wanted:
            return f"{path} is damaged: it has {size} bytes and not {wanted}."
        opened = DataFile(path)
        for of_file, at, length, name, wanted_sum in _pieces(manifest):
            if of_file == file and opened.checksum(at, length) != wanted_sum:
                return f"{path} is damaged: {name!r} has another checksum than in the manifest."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}."
    return ""

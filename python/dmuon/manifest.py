"""What a checkpoint holds and where, as JSON beside its data files, and the marker that commits it: its place
among the others and the manifest's SHA-256. What is not committed is not there."""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from dmuon import plain_data
from dmuon.safe_storage import DataFile, bytes_of

MANIFEST, MARKER = "manifest.json", "COMMIT"
FORMAT = 1
_KEYS = {"format", "step", "ranks", "tensors", "groups", "extra", "files"}
_Piece = tuple[int, int, str, int]  # at, bytes, name, checksum


def write_manifest(directory: Path, content: Mapping, order: int) -> None:
    """With its marker; both are on disk when this returns.

    Args:
        order: at least 1, and higher than that of what was committed before.
    """
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True).encode()
    _write(directory / MANIFEST, text)
    marker = f"{order} {_digest(text, order)}"
    _write(directory / MARKER, f"{marker} {zlib.crc32(marker.encode()):08x}".encode())
    sync(directory)


def _digest(text: bytes, order: int) -> str:
    return hashlib.sha256(text + (str(order).encode() if order else b"")).hexdigest()


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


def order_of(directory: Path) -> int:
    """The place of a checkpoint among those of its directory; 0 where it was saved before there was one.

    Raises:
        ValueError: its marker is missing or damaged.
    """
    return _marker(directory)[0]


def _marker(directory: Path) -> tuple[int, str]:
    """The order and the digest."""
    words = _read(directory / MARKER).decode(errors="replace").split()
    if len(words) == 1:
        return 0, words[0]
    body = " ".join(words[:-1])
    intact = len(words) == 3 and words[0].isdecimal() and int(words[0]) > 0
    if not intact or f"{zlib.crc32(body.encode()):08x}" != words[-1]:
        raise ValueError(f"{directory / MARKER} is damaged.")
    return int(words[0]), words[1]


def read_manifest(directory: Path) -> dict:
    """Raises ValueError naming the file that is missing, damaged or not ours, and what is wrong in it."""
    path = directory / MANIFEST
    text = _read(path)
    order, digest = _marker(directory)
    if _digest(text, order) != digest:
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
    problems = [_settings_problem(manifest)]
    problems += [_file_problem(directory, name) for name in manifest["files"]]
    problems += [_tensor_problem(*item) for item in manifest["tensors"].items()]
    return next(filter(None, problems), "") or _gap(manifest)


def _settings_problem(manifest: Mapping) -> str:
    if not _whole_numbers(manifest["step"], manifest["ranks"]):
        return f"has the step {manifest['step']!r} and the ranks {manifest['ranks']!r}; they must be whole numbers"
    groups = plain_data.loads(manifest["groups"])
    both = (groups, plain_data.loads(manifest["extra"]), *dict(groups).values())
    return (
        ""
        if all(isinstance(d, dict) for d in both)
        else "has groups or an extra that are no dictionaries"
    )


def _whole_numbers(*values) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _file_problem(directory: Path, name: str) -> str:
    """A manifest names files beside it, nothing else."""
    inside = name and Path(name).name == name and name not in (".", "..") and "\0" not in name
    if inside and not (directory / name).is_symlink():
        return ""
    return f"names {name!r}, which is not a file of its directory"


def _tensor_problem(name: str, tensor: Mapping) -> str:
    dtype = getattr(torch, tensor["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        return f"gives {name!r} the dtype {tensor['dtype']!r}, which torch has not"
    size, chunks = tensor["size"], tensor["chunks"]
    if not all(_whole_numbers(*c["offsets"], *c["sizes"], c["at"]) for c in chunks):
        return f"has places of {name!r} that are no whole numbers of at least 0"
    inside = all(
        len(c["offsets"]) == len(c["sizes"]) == len(size)
        and all(o + s <= n for o, s, n in zip(c["offsets"], c["sizes"], size))
        for c in chunks
    )
    distinct = len({tuple(c["offsets"]) for c in chunks}) == len(chunks)
    filled = sum(math.prod(c["sizes"]) for c in chunks) == math.prod(size)
    if inside and distinct and filled and _whole_numbers(*size):
        return ""
    return f"has pieces of {name!r} that do not make up {tuple(size)}"


def _gap(manifest: Mapping) -> str:
    """The pieces fill the files: every byte is known, and has a checksum."""
    by_file = _pieces(manifest)
    for file, pieces in by_file.items():
        if file not in manifest["files"]:
            return f"has {pieces[0][2]!r} in {file!r}, which it does not list"
        filled = 0
        for at, length, name, _ in pieces:
            if at != filled:
                return f"has {name!r} at {at} of {file!r}, and not at {filled}"
            filled += length
        if filled != manifest["files"][file]:
            return f"has other bytes in {file!r} than its tensors"
    return ""


def _pieces(manifest: Mapping) -> dict[str, list[_Piece]]:
    """Of each file, as they lie."""
    found: dict[str, list[_Piece]] = {file: [] for file in manifest["files"]}
    for name, tensor in manifest["tensors"].items():
        dtype = getattr(torch, tensor["dtype"])
        for c in tensor["chunks"]:
            piece = (c["at"], bytes_of(c["sizes"], dtype), name, c["checksum"])
            found.setdefault(c["file"], []).append(piece)
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece[:2])
    return found


def damage(directory: Path, manifest: Mapping, files: Iterable[str]) -> str:
    """The first thing that is wrong with these data files; empty where nothing is."""
    pieces, sizes = _pieces(manifest), manifest["files"]
    problems = (_damage(directory / file, sizes[file], pieces[file]) for file in files)
    return next(filter(None, problems), "")


def _damage(path: Path, wanted: int, pieces: list[_Piece]) -> str:
    try:
        size = path.stat().st_size
        if size != wanted:
            return f"{path} is damaged: it has {size} bytes and not {wanted}."
        opened = DataFile(path)
        for at, length, name, wanted_sum in pieces:
            if opened.checksum(at, length) != wanted_sum:
                return f"{path} is damaged: {name!r} has another checksum than in the manifest."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}."
    return ""

"""Files of ``torch.distributed.checkpoint`` with a JSON manifest in the place of its pickled one.

Data files are torch's own, read with ``weights_only``. The manifest says what lies where, and has the size and the
SHA-256 of every file; the marker has the manifest's. What is not committed is not there.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

MANIFEST, MARKER = "manifest.json", "COMMIT"
FORMAT = 1


class JsonWriter(FileSystemWriter):
    """``tensors`` is what the manifest says of them: on the coordinator, after a save. ``files``: what this rank
    has written."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.tensors: dict[str, dict] = {}
        self.files: set[str] = set()

    def write_data(self, plan, planner):
        future = super().write_data(plan, planner)
        self.files |= {result.storage_data.relative_path for result in future.value()}
        return future

    def finish(self, metadata: Metadata, results) -> None:
        where = {r.index: r.storage_data for of_rank in results for r in of_rank}
        self.tensors = {
            name: _described(name, tensor, where)
            for name, tensor in metadata.state_dict_metadata.items()
        }


def _described(name: str, tensor: TensorStorageMetadata, where: Mapping) -> dict:
    chunks = []
    for chunk in tensor.chunks:
        stored = where[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                "file": stored.relative_path,
                "at": stored.offset,
                "length": stored.length,
            }
        )
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}


class JsonReader(FileSystemReader):
    def __init__(self, path: Path, manifest: Mapping):
        super().__init__(path)
        self._tensors = manifest["tensors"]

    def read_metadata(self, *args, **kwargs) -> Metadata:
        tensors, where = {}, {}
        for name, tensor in self._tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
                for c in tensor["chunks"]
            ]
            for chunk, stored in zip(chunks, tensor["chunks"], strict=True):
                where[MetadataIndex(name, chunk.offsets)] = SimpleNamespace(
                    relative_path=stored["file"],
                    offset=stored["at"],
                    length=stored["length"],
                    transform_descriptors=None,
                )
            properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
        return Metadata(tensors, storage_data=where, storage_meta=StorageMeta(load_id=self.load_id))


def fingerprint(path: Path) -> dict:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_manifest(directory: Path, manifest: Mapping) -> None:
    """With the marker that commits it; both are on disk when this returns."""
    text = json.dumps(manifest, sort_keys=True).encode()
    _write(directory / MANIFEST, text)
    _write(directory / MARKER, hashlib.sha256(text).hexdigest().encode())
    sync(directory)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
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
    """Raises ValueError naming the file that is missing, damaged or not ours."""
    text = _read(directory / MANIFEST)
    marker = _read(directory / MARKER).decode(errors="replace").strip()
    if hashlib.sha256(text).hexdigest() != marker:
        raise ValueError(f"{directory / MANIFEST} is damaged: {MARKER} has another checksum.")
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{directory} has format {manifest.get('format')!r}; this dmuon reads {FORMAT}."
        )
    for name in manifest["files"]:
        _check_name(directory, name)
    for name, tensor in manifest["tensors"].items():
        for chunk in tensor["chunks"]:
            if chunk["file"] not in manifest["files"]:
                raise ValueError(
                    f"{directory / MANIFEST}: {name!r} lies in {chunk['file']!r}, which it does not list."
                )
    return manifest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error


def _check_name(directory: Path, name: str) -> None:
    """A manifest names files beside it, nothing else."""
    path = directory / name
    if not name or Path(name).name != name or name in (".", "..") or path.is_symlink():
        raise ValueError(
            f"{directory / MANIFEST} names {name!r}, which is not a file of its directory."
        )


def damage(directory: Path, manifest: Mapping, name: str) -> str:
    """What is wrong with one file; empty where nothing is."""
    path, wanted = directory / name, manifest["files"][name]
    try:
        size = path.stat().st_size
        if size != wanted["bytes"]:
            return f"{path} is damaged: it has {size} bytes and not {wanted['bytes']}."
        if fingerprint(path) != wanted:
            return f"{path} is damaged: it has another checksum than the manifest."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}."
    return ""

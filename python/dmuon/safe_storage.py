"""Data files of a checkpoint: the bytes of its tensors one after the other, nothing else, so that nothing in
them can be executed. The manifest says what lies where, and has a checksum for each piece."""

import ctypes
import errno
import math
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

ALIGNMENT = 16  # of pieces; the zeros that fill up belong to the piece before them
_ROWS, _COLUMNS = (
    128,
    1021,
)  # of a block that a checksum adds up; 1021, so that pages do not fit into columns
_BLOCK = 8 * _ROWS * _COLUMNS
_WINDOW = 16 * _BLOCK
_POPULATE_READ = (
    22  # of Linux's madvise, where it knows it: an unreadable disk is an error, and no signal
)


@dataclass(frozen=True)
class Stored:
    """One piece of a tensor in a file."""

    file: str
    at: int
    checksum: int


class _AsItIs:
    """What ``torch.distributed.checkpoint`` asks of a storage besides."""

    def reset(self, checkpoint_id=None) -> None:
        pass

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


class Writer(_AsItIs, StorageWriter):
    """``tensors`` and ``files`` are what the manifest says of them: on the coordinator, after a save."""

    def __init__(self, directory: Path):
        self._directory = directory
        self.tensors: dict[str, dict] = {}
        self.files: dict[str, int] = {}  # bytes

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        pass

    def prepare_global_plan(self, plans):
        return [replace(plan, storage_data=f"rank{i}.data") for i, plan in enumerate(plans)]

    def write_data(self, plan, planner) -> Future:
        results = []
        if plan.items:  # a rank may have nothing to write
            with open(self._directory / plan.storage_data, "xb") as file:
                for item in plan.items:
                    at, value = file.tell(), planner.resolve_data(item)
                    stored = Stored(plan.storage_data, at, _write(file, value))
                    results.append(WriteResult(item.index, file.tell() - at, stored))
                file.flush()
                os.fsync(file.fileno())
        return _done(results)

    def finish(self, metadata: Metadata, results) -> None:
        written = [result for of_rank in results for result in of_rank]
        where = {result.index: result.storage_data for result in written}
        for name, tensor in metadata.state_dict_metadata.items():
            self.tensors[name] = _described(name, tensor, where)
        for result in written:
            name = result.storage_data.file
            self.files[name] = self.files.get(name, 0) + result.size_in_bytes


def _done(result) -> Future:
    future = Future()
    future.set_result(result)
    return future


def _described(name: str, tensor: TensorStorageMetadata, where: Mapping) -> dict:
    chunks = [
        {
            "offsets": list(chunk.offsets),
            "sizes": list(chunk.sizes),
            **vars(where[MetadataIndex(name, chunk.offsets)]),
        }
        for chunk in tensor.chunks
    ]
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}


def _write(file, tensor: torch.Tensor) -> int:
    """Returns the checksum."""
    tensor = tensor.detach().cpu().contiguous()
    memory = _memory(tensor)
    file.write(memory)
    filling = bytes(-len(memory) % ALIGNMENT)
    file.write(filling)
    return zlib.crc32(filling, checksum(memory))


def checksum(memory: memoryview, before: int = 0) -> int:
    """A CRC-32: of each block its 64-bit words are added up by columns and the sums go in, what is left over
    goes in as it is. Three times as fast as all bytes; what changes within a row changes the sums for certain.

    Args:
        before: the checksum of what comes before, a whole number of blocks.
    """
    blocks = len(memory) // _BLOCK
    if blocks:
        words = torch.frombuffer(memory, dtype=torch.int64, count=blocks * _ROWS * _COLUMNS)
        sums = words.view(blocks, _ROWS, _COLUMNS).sum(1)
        before = zlib.crc32(_memory(sums), before)
    return zlib.crc32(memory[blocks * _BLOCK :], before)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor on the CPU, which must outlive it."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def bytes_of(sizes, dtype: torch.dtype) -> int:
    """Of a piece in a file."""
    return -(-math.prod(sizes) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class DataFile:
    """A data file, mapped into memory."""

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Nobody writes to it, but torch.frombuffer wants memory that it may.
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""

    def checksum(self, at: int, size: int) -> int:
        result = 0
        for start in range(at, at + size, _WINDOW):
            length = min(_WINDOW, at + size - start)
            self._read_in(start, length)
            result = checksum(memoryview(self._map)[start : start + length], result)
        return result

    def piece(self, at: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """In the file's own memory: for reading."""
        if not math.prod(sizes):
            return torch.empty(sizes, dtype=dtype)
        self._read_in(at, bytes_of(sizes, dtype))
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(sizes), offset=at).view(
            sizes
        )

    def content(self, at: int, size: int) -> bytes:
        self._read_in(at, size)
        return self._map[at : at + size]

    def _read_in(self, at: int, size: int) -> None:
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._map.madvise(_POPULATE_READ, start, at + size - start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


class Reader(_AsItIs, StorageReader):
    def __init__(self, directory: Path, manifest: Mapping):
        self._directory, self._where = directory, {}
        self._tensors = {}
        for name, tensor in manifest["tensors"].items():
            chunks = []
            for c in tensor["chunks"]:
                chunk = ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
                chunks.append(chunk)
                stored = Stored(c["file"], c["at"], c["checksum"])
                self._where[MetadataIndex(name, chunk.offsets)] = (stored, chunk.sizes)
            properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
            size = torch.Size(tensor["size"])
            self._tensors[name] = TensorStorageMetadata(properties, size, chunks)

    def bytes_of(self, name: str) -> bytes:
        """Of a tensor that lies in one piece, or of its first one."""
        tensor = self._tensors[name]
        stored, sizes = self._where[MetadataIndex(name, tensor.chunks[0].offsets)]
        size = math.prod(sizes) * tensor.properties.dtype.itemsize
        return DataFile(self._directory / stored.file).content(stored.at, size)

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return Metadata(self._tensors)

    def set_up_storage_reader(self, metadata, is_coordinator: bool, *args, **kwargs) -> None:
        pass

    def read_data(self, plan, planner) -> Future:
        files: dict[str, DataFile] = {}
        for item in plan.items:
            where = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
            stored, sizes = self._where[where]
            if stored.file not in files:
                files[stored.file] = DataFile(self._directory / stored.file)
            dtype = self._tensors[where.fqn].properties.dtype
            piece = files[stored.file].piece(stored.at, sizes, dtype)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                piece = piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        return _done(None)

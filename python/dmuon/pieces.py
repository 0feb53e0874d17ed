"""A tensor of which this rank holds some ranges of one dim, for ``torch.distributed.checkpoint``."""

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dmuon.checkpoint import asked_by_torch_distributed


class Pieces(torch.Tensor):
    """A shard of a tensor-parallel weight, or of its state. DTensors do for most, but not where a rank's
    rows do not lie side by side (a fused q, k and v).

    What torch.distributed.checkpoint asks of a tensor: where its chunks lie, and their memory. It is no
    operand.
    """

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape, dim: int, ranges: list[tuple[int, int]]):
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device
        )
        self.local, self._dim = local.detach(), dim
        self._ranges = [(start, length) for start, length in ranges if length]
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in ("detach", "alias"):
            return args[0]
        raise cls._refusal(func.__name__)

    @staticmethod
    def _refusal(what: str) -> RuntimeError:
        return RuntimeError(
            f"{what} of a tensor-parallel shard in dmuon.state_dict. It is for "
            "torch.distributed.checkpoint; dmuon.get_model_state_dict gives whole tensors."
        )

    def __repr__(self, **kwargs):
        return f"Pieces(shape={tuple(self.shape)}, dim={self._dim}, ranges={self._ranges})"

    # How async_save makes its copy: an empty one, then each attribute.

    def new_empty(self, *args, **kwargs):
        return Pieces(self.local, self.shape, self._dim, self._ranges)

    def data_ptr(self) -> int:
        if asked_by_torch_distributed():
            return 0
        raise self._refusal("data_ptr")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.local.numel():
            return []
        return [self._chunk(start, length) for start, length in self._ranges]

    def _chunk(self, start: int, length: int) -> ChunkStorageMetadata:
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        offsets[self._dim], sizes[self._dim] = start, length
        return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))

    def __create_write_items__(self, fqn: str, object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """A view: what is read is written there."""
        start, at = index.offset[self._dim], 0
        for first, length in self._ranges:
            if first == start:
                return self.local.detach().narrow(self._dim, at, length)
            at += length
        raise ValueError(f"{index.fqn} has no piece at {tuple(index.offset)} on this rank.")

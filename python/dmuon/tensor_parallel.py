"""What a DTensor parameter is to the engine: the shard this rank holds, and where the others lie."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dmuon import _C
from dmuon.axes import tp_dims

Ranges = list[tuple[int, int]]  # (start, length) along the dim that is cut


@dataclass(frozen=True)
class Layout:
    """How a parameter lies on the TP ranks. ``dim`` None: whole on each of them."""

    dim: int | None = None
    ranges: tuple[Ranges, ...] = ()  # per TP rank

    def local_of(self, whole: torch.Tensor, tp: int) -> torch.Tensor:
        """What TP rank ``tp`` holds of a whole tensor."""
        if self.dim is None:
            return whole
        return torch.cat([whole.narrow(self.dim, *r) for r in self.ranges[tp]], self.dim)

    def put(self, whole: torch.Tensor, piece: torch.Tensor, tp: int) -> None:
        """The reverse, in place."""
        lengths = [length for _, length in self.ranges[tp]]
        for (start, length), part in zip(self.ranges[tp], piece.split(lengths, self.dim)):
            whole.narrow(self.dim, start, length).copy_(part)

    def numel_on(self, shape: torch.Size, tp: int) -> int:
        if self.dim is None:
            return shape.numel()
        held = sum(length for _, length in self.ranges[tp])
        return shape.numel() // max(shape[self.dim], 1) * held

    def as_tuple(self, shape: torch.Size) -> tuple:
        return (self.dim, list(shape), [list(r) for r in self.ranges])


def layout_of(name: str, parameter: torch.Tensor, dp_names: set[str]) -> Layout:
    """
    Raises:
        ValueError: a placement that cannot be a weight's.
    """
    if not isinstance(parameter, DTensor):
        return Layout()
    mesh = parameter.device_mesh
    for placement in parameter.placements:
        if placement.is_partial():
            raise ValueError(
                f"parameter {name!r} has the pending placement {placement}: its ranks hold terms of a "
                "sum. Redistribute it to Shard or Replicate before dedicate_params."
            )
    dims = tp_dims(parameter, dp_names)
    if not dims:  # an axis of one rank
        return Layout()
    axis = mesh.mesh_dim_names.index(dims[0])
    placement, size = parameter.placements[axis], mesh.size(axis)
    if isinstance(placement, Replicate):
        return Layout()
    dim = placement.dim % parameter.ndim
    ranges = tuple(_runs(held) for held in _indices(placement, dim, parameter.shape[dim], size))
    layout = Layout(dim, ranges)
    held = sum(length for _, length in ranges[mesh.get_local_rank(axis)])
    if held != parameter._local_tensor.shape[dim]:
        raise ValueError(
            f"parameter {name!r} is placed as {placement} over {size} ranks in a way this version does "
            "not know. Leave it out of the predicate."
        )
    return layout


def _indices(placement, dim: int, length: int, size: int) -> list[torch.Tensor]:
    """Per rank the indices of the cut dim it holds, in the order of its shard."""
    every = torch.arange(length)
    if type(placement) is Shard:
        chunk = max(-(-length // size), 1)
        return [every[chunk * r : chunk * (r + 1)] for r in range(size)]
    along = every.reshape([1] * dim + [length])
    pieces, _ = placement._split_tensor(along, size, with_padding=False, contiguous=True)
    return [piece.flatten() for piece in pieces]


def _runs(indices: torch.Tensor) -> Ranges:
    """As ranges of consecutive indices; one empty range where there are none."""
    if indices.numel() == 0:
        return [(0, 0)]
    ends = (indices.diff() != 1).nonzero().flatten() + 1
    return [(int(run[0]), run.numel()) for run in indices.tensor_split(ends.tolist())]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    return local.wait() if hasattr(local, "wait") else local


def wrap_like(parameter: DTensor):
    """Makes DTensors of local tensors, laid out as ``parameter`` is."""
    return functools.partial(
        _from_local,
        parameter.device_mesh,
        parameter.placements,
        parameter.shape,
        parameter.stride(),
    )


@torch.no_grad()
def _from_local(mesh, placements, shape, stride, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


@torch.no_grad()
def distribute_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A copy of what this rank holds of ``whole``, laid out as ``parameter`` is. Local."""
    whole = whole.detach().to(parameter.device)
    if not isinstance(parameter, DTensor):
        return whole.clone()
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()


def wrapper_of(parameter: torch.Tensor) -> "_C.DTensorWrapper | None":
    if not isinstance(parameter, DTensor):
        return None
    return _C.DTensorWrapper(parameter.placements, wrap_like(parameter))


def overlaps_itself(local: torch.Tensor) -> bool:
    """Whether several of its elements are one in memory, as those of an expanded tensor."""
    return any(
        stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride(), strict=True)
    )


def overlapping(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of those that cannot be written to: of whose elements here several are one in memory."""
    return [name for name, t in tensors.items() if overlaps_itself(local_part(t))]

"""Meshes as users write them, and which slice of one goes where."""

import functools
import math
from dataclasses import dataclass

import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import run_ranks

DATA = ("dp", "replicate", "shard")


@dataclass(frozen=True)
class Layout:
    """Sizes by axis, the outermost first. The last one is tensor-parallel unless its name is one
    of `DATA`."""

    axes: tuple  # of (name, size)

    def __str__(self):
        return "x".join(f"{size}{name}" for name, size in self.axes)

    @property
    def names(self):
        return tuple(name for name, _ in self.axes)

    @property
    def data_names(self):
        return tuple(name for name in self.names if name in DATA)

    @property
    def tp_name(self):
        return self.names[-1] if self.names[-1] not in DATA else None

    @property
    def ranks(self):
        return math.prod(size for _, size in self.axes)

    @property
    def tp(self):
        """Size of the tensor-parallel axis."""
        return dict(self.axes).get(self.tp_name, 1)

    @property
    def data_ranks(self):
        """Ranks that see different data."""
        return self.ranks // self.tp

    def data_rank(self, rank):
        return rank // self.tp

    @property
    def is_flat(self):
        return self.names == ("dp",)

    def mesh(self):
        return _make(self.axes) if self.is_flat else _kept(self.axes)

    def slices(self, mesh):
        """The meshes of `dedicate_params`."""
        if self.is_flat:
            return {"mesh": mesh}
        slices = {"mesh": mesh[self.data_names[-1]]}
        if len(self.data_names) == 2:
            slices["replicate_mesh"] = mesh[self.data_names[0]]
        return slices

    def data_mesh(self, mesh):
        """The mesh of `fully_shard`."""
        return mesh if self.data_names == self.names else mesh[self.data_names]

    def holds_copy(self, rank, owner):
        """Whether `rank` keeps a copy of what `owner` owns: the same shard of another replica."""
        shards = dict(self.axes)[self.data_names[-1]]
        return self.data_rank(rank) % shards == self.data_rank(owner) % shards


def _make(axes):
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


# One per process: the groups of its axes are kept from test to test.
_kept = functools.cache(_make)


def flat(ranks):
    return Layout((("dp", ranks),))


def hsdp(replicate, shard):
    return Layout((("replicate", replicate), ("shard", shard)))


def dp_tp(dp, tp, name="tp"):
    return Layout((("dp", dp), (name, tp)))


def cube(replicate, shard, tp):
    return Layout((("replicate", replicate), ("shard", shard), ("tp", tp)))


def run_on(layout, check, *args, limit_s=60.0):
    """Calls `check(rank, layout, *args)` on every rank of the layout."""
    return run_ranks(_on, layout.ranks, layout, check, args, limit_s=limit_s)


def _on(rank, world_size, layout, check, args):
    return check(rank, layout, *args)


SQUARE = dp_tp(2, 2)


def on(layouts):
    """A test of each layout."""
    return pytest.mark.parametrize("layout", layouts, ids=str)

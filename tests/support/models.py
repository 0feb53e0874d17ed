"""Small models of the multi-rank tests, and the usual way to wrap them in FSDP2."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

INPUTS, OUTPUTS = 24, 20  # more than the dims, so that every gradient has full rank


class Block(nn.Module):
    """A norm, two Linears with bias, a residual: two matrices of odd sizes.

    RMSNorm: behind a LayerNorm every gradient of `up` has an exact null direction, whose rounding
    noise Newton-Schulz amplifies. `NormedBlock` has that.
    """

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class NormedBlock(Block):
    def __init__(self, dim, hidden):
        super().__init__(dim, hidden)
        self.norm = nn.LayerNorm(dim)


class Bare(nn.Module):
    """Nothing but matrices: FSDP2 itself, which packs in order of registration, has no part."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """`inp`, blocks, `head`. The matrices of the blocks are the ones to dedicate (`in_blocks`)."""

    def __init__(self, dims=((17, 29), (17, 18)), block=Block):
        super().__init__()
        self.inp = nn.Linear(INPUTS, dims[0][0])
        self.blocks = nn.ModuleList(block(*sizes) for sizes in dims)
        self.head = nn.Linear(dims[0][0], OUTPUTS)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_blocks(name, param):
    return "blocks." in name and param.ndim >= 2


def shard(model, mesh, **options):
    """Each block, then the root, as every FSDP2 script does."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)

"""Transformers for tensor parallelism, which run in one process as they are, and their plans.

Features and heads are counted by what the weights are, so one forward serves whole weights and
shards of them. Sizes are odd where torch's own styles allow it.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

BATCH, VOCABULARY, SEQUENCE, DIM, HEAD, HIDDEN, OUTPUTS = 96, 31, 4, 16, 4, 29, 20


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def attend(q, k, v):
    """Causal attention over `[batch, sequence, heads * HEAD]`."""
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2) / HEAD**0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (linear(DIM, DIM) for _ in range(3))
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.o(attend(self.q(x), self.k(x), self.v(x)))


class FusedAttention(nn.Module):
    """q, k and v of a head are neighbours, so that a shard of the fused weight has whole heads."""

    def __init__(self):
        super().__init__()
        self.qkv = linear(DIM, 3 * DIM)
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, HEAD)).unbind(-2)
        return self.o(attend(*(t.flatten(-2) for t in (q, k, v))))


class StridedAttention(FusedAttention):
    """q, then k, then v: a shard has its heads of each, three stripes of the fused weight."""

    def forward(self, x):
        weight = self.qkv.weight
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        return self.o(attend(*F.linear(x, weight).chunk(3, dim=-1)))


class Gated(nn.Module):
    """`HIDDEN` is odd: shards are uneven."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGated(nn.Module):
    """One weight of `2 * 13` rows, which 4 ranks hold as 7, 7, 7 and 5."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = linear(DIM, 26), linear(13, DIM)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Narrow(nn.Module):
    """One feature between two weights: all ranks but the first have an empty shard of each."""

    def __init__(self):
        super().__init__()
        self.squeeze, self.spread = linear(DIM, 1), linear(1, DIM)

    def forward(self, x):
        return self.spread(torch.tanh(self.squeeze(x)))


class Residual(nn.Module):
    """`x + part(norm(x))`, one after the other."""

    def __init__(self, **parts):
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.RMSNorm(DIM) for name in parts})
        self.parts = nn.ModuleDict(parts)

    def forward(self, x):
        for name, part in self.parts.items():
            x = x + part(self.norms[name](x))
        return x


class Transformer(nn.Module):
    """Tokens in, `OUTPUTS` numbers per position out. `blocks` are the ones to dedicate."""

    def __init__(self, *blocks):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(DIM)
        self.head = linear(DIM, OUTPUTS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mixed():
    """Sharded, strided, uneven, empty, replicated and plain weights, side by side."""
    return Transformer(
        Residual(attention=Attention(), gated=Gated()),
        Residual(attention=FusedAttention(), gated=FusedGated(), plain=linear(DIM, DIM)),
        Residual(attention=StridedAttention(), narrow=Narrow(), whole=linear(DIM, DIM)),
    )


def sequence():
    """For sequence parallelism: between the parts each rank has some positions only."""
    return Transformer(
        Residual(attention=Attention(), gated=Gated(), whole=linear(DIM, DIM)),
        Residual(attention=Attention(), gated=Gated(), whole=linear(DIM, DIM)),
    )


def tokens(g):
    """As `regression` of parity.py: whole input and target."""
    x = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=g)
    return x, torch.randn(BATCH, SEQUENCE, OUTPUTS, generator=g)


# How they are sharded ----------------------------------------------------------------------------


class Whole(ParallelStyle):
    """A Linear whose weight is a DTensor, whole on every rank; only its input may be sharded."""

    def __init__(self, layout=None):
        super().__init__()
        self.layout = [layout or Replicate()]

    def _apply(self, module, mesh):
        return distribute_module(module, mesh, None, self._enter, self._leave)

    def _enter(self, module, inputs, mesh):
        return as_dtensor(inputs[0], mesh, self.layout)

    def _leave(self, module, output, mesh):
        return output.redistribute(placements=self.layout).to_local()


class Striped(ParallelStyle):
    """A Linear of three equal parts, each cut into one stripe per rank. The module that holds it
    multiplies the local weight itself."""

    def _apply(self, module, mesh):
        pieces = [part.chunk(mesh.size())[mesh.get_local_rank()] for part in module.weight.chunk(3)]
        weight = DTensor.from_local(
            torch.cat(pieces).detach(),
            mesh,
            [_StridedShard(0, split_factor=3)],
            run_check=False,
            shape=module.weight.shape,
            stride=module.weight.stride(),
        )
        module.register_parameter("weight", nn.Parameter(weight))
        return module


class PartialInput(ParallelStyle):
    """Every rank gets the whole input; the gradients that the ranks give back are summed."""

    def _apply(self, module, mesh):
        def enter(module, inputs):
            return as_dtensor(inputs[0], mesh, [Replicate()]).to_local(grad_placements=[Partial()])

        module.register_forward_pre_hook(enter)
        return module


def as_dtensor(x, mesh, placements):
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, placements, run_check=False)


ATTENTION = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "o": RowwiseParallel(),
}
GATED = {  # DTensors in between: torch guesses the size of a plain shard, and uneven ones wrong
    "gate": ColwiseParallel(use_local_output=False),
    "up": ColwiseParallel(use_local_output=False),
    "down": RowwiseParallel(),
}


def parallelize_mixed(model, tp):
    parallelize_module(model, tp, {"embed": RowwiseParallel(input_layouts=Replicate())})
    first, second, third = model.blocks
    parallelize_module(first.parts.attention, tp, ATTENTION)
    parallelize_module(first.parts.gated, tp, GATED)
    parallelize_module(
        second.parts,
        tp,
        {
            "attention.qkv": ColwiseParallel(),
            "attention.o": RowwiseParallel(),
            "gated.gate_up": ColwiseParallel(output_layouts=Replicate()),
            "gated.down": RowwiseParallel(input_layouts=Replicate()),
        },
    )
    parallelize_module(
        third.parts,
        tp,
        {
            "attention": PartialInput(),
            "attention.qkv": Striped(),
            "attention.o": RowwiseParallel(),
            "narrow.squeeze": ColwiseParallel(use_local_output=False),
            "narrow.spread": RowwiseParallel(),
            "whole": Whole(),
        },
    )
    parallelize_module(model, tp, {"head": ColwiseParallel(output_layouts=Replicate())})


def parallelize_sequence(model, tp):
    positions = Shard(1)
    out = {"output_layouts": positions}
    parallelize_module(
        model,
        tp,
        {
            "embed": ColwiseParallel(**out),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=positions, output_layouts=Replicate()),
        },
    )
    whole_sequence = PrepareModuleInput(
        input_layouts=(positions,), desired_input_layouts=(Replicate(),)
    )
    for block in model.blocks:
        parallelize_module(block.norms, tp, dict.fromkeys(block.norms, SequenceParallel()))
        parallelize_module(block.parts, tp, {"attention": whole_sequence, "gated": whole_sequence})
        parallelize_module(block.parts.attention, tp, ATTENTION | {"o": RowwiseParallel(**out)})
        parallelize_module(block.parts.gated, tp, GATED | {"down": RowwiseParallel(**out)})
        parallelize_module(block.parts, tp, {"whole": Whole(positions)})


# For check_parity and setup.
MIXED = {"make_model": mixed, "parallelize": parallelize_mixed, "sample": tokens}
SEQUENCE_PARALLEL = {
    "make_model": sequence,
    "parallelize": parallelize_sequence,
    "sample": tokens,
}


def subject(layout):
    """The model of a layout: the one with all kinds of weights where it has a TP axis."""
    return MIXED if layout.tp_name else {}

"""What tensor parallelism can save, on two shards of two TP ranks: bytes, and memory for messages.

``tp_distributed_gram`` exchanges Gram matrices and factors instead of gradients and updates. The error
it may make is what one process in plain torch makes when it adds the gradients in another order,
twice. ``tp_buffer_reuse`` may change no bit; its bytes are those that one rank keeps for messages over
the tp axis in a step, the peak, from the report.
"""

from dataclasses import dataclass

import dmuon
import grids
import parity
import torch
import torch.distributed as dist
from grids import STEPS, Grid
from models import block_matrices
from parity import LAYERS
from support import Figure, run_ranks

GRID = Grid(shard=2, tp=2)
CHANNELS = ("tp_gather", "tp_scatter")
# By form: what is left where all units are of one size.
REUSE = {"gather": 0.5 + 0.5 / LAYERS, "scatter": 0.5 + 0.5 / LAYERS, "all": 1 / LAYERS}
FLAGS = 1.01  # beside the payload: whether there was a gradient


@dataclass
class Seen:
    """By one rank."""

    sent: dict[str, float]  # bytes on both TP channels per step: "whole" matrices, in "shards"
    saved: int  # bytes per step of the job, as the report says on every rank
    in_shards: int  # matrices
    differences: dict[str, float]  # on rank 0
    changed: int  # elements that differ with any form of reuse, on rank 0
    staging: dict[str, int]  # bytes by form of reuse


def measure() -> list[Figure]:
    grids.one_process()
    ranks = run_ranks(observe, GRID.ranks)
    return [*gram_figures(ranks), *staging_figures(ranks)]


def gram_figures(ranks: list[Seen]) -> list[Figure]:
    whole, shards = (sum(rank.sent[form] for rank in ranks) for form in ("whole", "shards"))
    saved, differences = ranks[0].saved, ranks[0].differences
    matrices = len(block_matrices(parity.initial_model()))
    return [
        Figure(
            "tp_distributed_gram: bytes on the tp axis, with / without",
            shards / whole,
            FLAGS * (1 - saved / whole),
        ),
        Figure("  as the report says", 1 - saved / whole),
        Figure(f"  matrices in shards, of {matrices}", ranks[0].in_shards),
        Figure("  KiB a step without", whole / 1024),
        Figure("  KiB a step with", shards / 1024),
        Figure(
            f"tp_distributed_gram: weights after {STEPS} steps, with against without",
            differences["each other"],
            grids.tolerance(),
        ),
        Figure("  with against one process", differences["shards"]),
        Figure("  without against one process", differences["whole"]),
    ]


def staging_figures(ranks: list[Seen]) -> list[Figure]:
    peak = {form: max(rank.staging[form] for rank in ranks) for form in ("none", *REUSE)}
    return [
        Figure("tp_buffer_reuse: elements of the weights that differ", ranks[0].changed, 0),
        *(
            Figure(
                f"tp_buffer_reuse={form!r}: peak staging, with / without",
                peak[form] / peak["none"],
                FLAGS * left,
            )
            for form, left in REUSE.items()
        ),
        Figure("  without: KiB on the rank with the most", peak["none"] / 1024),
    ]


def observe() -> Seen:
    whole, sent_whole, without = run()
    shards, sent_shards, with_gram = run(muon={"tp_distributed_gram": True})
    reused = {form: run(dedicate={"tp_buffer_reuse": form}) for form in REUSE}
    first = dist.get_rank() == 0
    return Seen(
        sent={"whole": sent_whole, "shards": sent_shards},
        saved=with_gram["distributed_gram_saved_bytes"],
        in_shards=len(with_gram["distributed_gram"]),
        differences=compare(shards, whole) if first else {},
        changed=sum(differing(weights, whole) for weights, _, _ in reused.values()) if first else 0,
        staging={"none": staging_bytes(without)}
        | {form: staging_bytes(told) for form, (_, _, told) in reused.items()},
    )


def run(dedicate: dict | None = None, muon: dict | None = None):
    """The weights at the end, the bytes that this rank sends over the tp axis in a step, and what the
    report says of tensor parallelism."""
    model, optimizer = grids.build(GRID, dedicate, **(muon or {}))
    before = []

    def after(step: int) -> None:
        if step == 1:
            before.append(tp_bytes(model))

    grids.train(model, optimizer, GRID, after)
    sent = (tp_bytes(model) - before[0]) / (STEPS - 1)
    return grids.whole_weights(model), sent, dmuon.report(model)["tensor_parallel"]


def tp_bytes(model) -> int:
    sent = dmuon.report(model)["sent_bytes_by_channel"]
    return sum(sent[channel] for channel in CHANNELS)


def compare(shards: parity.Parameters, whole: parity.Parameters) -> dict[str, float]:
    return {
        "each other": parity.difference(shards, whole),
        "shards": grids.error(shards),
        "whole": grids.error(whole),
    }


def differing(some: parity.Parameters, other: parity.Parameters) -> int:
    return sum(int(torch.ne(some[name], other[name]).sum()) for name in other)


def staging_bytes(told: dict) -> int:
    return sum(direction["bytes"] for direction in told["staging"].values())

"""What moves, and how often, in jobs of two and three axes: hybrid sharding, tensor parallelism, both.

P is the size of the matrices, all cut over the T ranks of the tp axis; R and G are the sizes of the
replicate and the shard axis. Bytes are those of the whole job and step, from the flight ring; the
bound of each channel is what no schedule can do without:

- materialise: whoever computes with a weight must get it: in each replica G-1 ranks their shard over
  tp, together R (G-1) P, once for forward and once for backward.
- reduce: each rank but the last of a sum must send its term or a partial sum: R (G-1) P.
- replicate_reduce: the same among the replicas, for what their holders have summed: (R-1) P.
- publish: the holder in each other replica must get the update: (R-1) P.
- tp_gather: Newton-Schulz sees whole matrices, so a TP owner must get what it does not hold of its
  own: P (1 - 1/T) with even shards, once in the job; computed from the shapes and owners.
- tp_scatter: the way back, the same.

What comes on top is one element per matrix and message, which says whether its sender had a gradient:
below one in 2,000 here. The kernel's count has the agreements and the frames of the protocol too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import dmuon
import grids
import parity
import torch
import torch.distributed as dist
from grids import STEPS, Grid
from models import is_block_matrix
from support import Figure, run_ranks
from wire_bytes import kernel_sent_bytes

GRIDS = (Grid(replicate=2, shard=2), Grid(shard=2, tp=2), Grid(replicate=2, shard=2, tp=2))
PASSES = {"materialise": 2}  # with reshard_after_forward; all others: once a step
BYTES_LIMIT, KERNEL_LIMIT = 1.01, 1.05


@dataclass
class Seen:
    """By one rank. Bytes are per step."""

    weights_error: float  # rank 0 only
    matrices: dict[str, tuple[int, int, int]]  # elements, of them on this rank, owner
    sent: dict[str, float]  # by channel
    collectives: dict[str, int]  # by channel, of any unit in any step: the most
    newton_schulz: list[int]  # calls by matrix, of all steps
    kernel_sent: float


def measure() -> list[Figure]:
    grids.one_process()
    return [figure for grid in GRIDS for figure in measure_grid(grid)]


def measure_grid(grid: Grid) -> list[Figure]:
    ranks = run_ranks(observe, grid.ranks, grid)
    bounds = lower_bounds(grid, ranks)
    silent = {c for rank in ranks for c, sent in rank.sent.items() if sent} - bounds.keys()
    if silent - {"control"}:
        raise RuntimeError(f"{grid}: bytes on {silent}, where none are needed")
    return [
        Figure(f"{grid}: weights against one process", ranks[0].weights_error, grids.tolerance()),
        *newton_schulz_figures(grid, ranks),
        *(
            Figure(f"{grid}: bytes, {channel} / bound", moved(ranks, channel) / least, BYTES_LIMIT)
            for channel, least in bounds.items()
        ),
        Figure(
            f"{grid}: bytes, the kernel's count / all bounds",
            sum(rank.kernel_sent for rank in ranks) / sum(bounds.values()),
            KERNEL_LIMIT,
        ),
        Figure(
            f"{grid}: collectives of a unit, channel and pass: the most", most(ranks, bounds), 1
        ),
    ]


def newton_schulz_figures(grid: Grid, ranks: list[Seen]) -> list[Figure]:
    calls = [sum(of_matrix) for of_matrix in zip(*(rank.newton_schulz for rank in ranks))]
    wrong = max(abs(count - STEPS) for count in calls)
    busiest = max(sum(rank.newton_schulz) for rank in ranks) / STEPS
    return [
        Figure(f"{grid}: Newton-Schulz calls of a matrix, too many or few", wrong, 0),
        Figure(f"  of {len(calls)} matrices a step, on the busiest of {len(ranks)} ranks", busiest),
    ]


def most(ranks: list[Seen], channels: Iterable[str]) -> float:
    return max(rank.collectives[c] / PASSES.get(c, 1) for rank in ranks for c in channels)


def moved(ranks: list[Seen], channel: str) -> float:
    return sum(rank.sent[channel] for rank in ranks)


def lower_bounds(grid: Grid, ranks: list[Seen]) -> dict[str, float]:
    """Bytes of the job and step, by channel; those of axes with one rank are left out."""
    held = 4 * sum(local for rank in ranks for _, local, _ in rank.matrices.values())
    cell = held / (grid.replicate * grid.shard)  # once, over the TP ranks
    within = (grid.shard - 1) * grid.replicate * cell
    across = (grid.replicate - 1) * cell
    away = 4 * sum(
        numel - ranks[owner].matrices[name][1]
        for name, (numel, _, owner) in ranks[0].matrices.items()
    )
    bounds = {
        "materialise": 2 * within,
        "reduce": within,
        "replicate_reduce": across,
        "publish": across,
        "tp_gather": away,
        "tp_scatter": away,
    }
    return {channel: least for channel, least in bounds.items() if least}


def observe(grid: Grid) -> Seen:
    nobody = kernel_bytes_of_nobody(grid)
    model, optimizer = grids.build(grid, replicate_async=False)
    before = []

    def after(step: int) -> None:
        if step == 1:  # what only the first step does is over
            before.extend((kernel_sent_bytes(), dmuon.report(model)["sent_bytes_by_channel"]))

    grids.train(model, optimizer, grid, after)
    kernel, sent = kernel_sent_bytes() - before[0], dmuon.report(model)["sent_bytes_by_channel"]
    weights = grids.whole_weights(model)
    return Seen(
        weights_error=grids.error(weights) if dist.get_rank() == 0 else 0.0,
        matrices={
            p.fqn: (p.numel, p._orig_size.numel(), p.owner_rank)
            for p in dmuon.get_dedicated_params(model)
        },
        sent={c: (bytes_ - before[1][c]) / (STEPS - 1) for c, bytes_ in sent.items()},
        collectives=most_collectives(dmuon.runtime.runtime_of(model).ring.records()),
        newton_schulz=list(optimizer._muon.ns_calls_per_matrix()),
        kernel_sent=kernel / (STEPS - 1) - nobody,
    )


def kernel_bytes_of_nobody(grid: Grid, steps: int = 3) -> float:
    """What a step sends when nobody moves the matrices."""
    model = parity.initial_model()
    grids.distribute(model, grid, dedicated=False, ignored=True)
    rest = [p for n, p in model.named_parameters() if not is_block_matrix(n, p)]
    optimizer = torch.optim.AdamW(rest)
    grids.train_step(model, optimizer, grid, 1)
    before = kernel_sent_bytes()
    for step in range(steps):
        grids.train_step(model, optimizer, grid, step)
    return (kernel_sent_bytes() - before) / steps


def most_collectives(records: list[dict]) -> dict[str, int]:
    """By channel. Broadcasts from different ranks that are in flight together are one."""
    by_step = defaultdict(list)
    for record in records:
        if record["step"] > 0:  # of the first one, some are setup
            by_step[record["channel"], record["unit"], record["step"]].append(record)
    most: Counter = Counter()
    for (channel, _, _), found in by_step.items():
        most[channel] = max(most[channel], count_together(found))
    return most


def count_together(records: list[dict]) -> int:
    count, roots, ends = 0, set(), 0.0
    for record in records:
        start, root = record["start_us"], record["root"]
        if not roots or root < 0 or root in roots or start > ends:
            count, roots, ends = count + 1, set(), float("inf")
        roots.add(root)
        ends = min(ends, start + record["duration_us"])
    return count

"""What runs beside what, on meshes: context without limits, for two cores that all ranks share.

The gather of gradients over the tp axis runs on its own lane beside backward; its overlap is the part
of its time that the training thread does not wait for. Its time includes waiting for the peer, which
computes on the same cores. The publish over the replicate axis may end in the next forward.

Both sides of a ratio train in the same processes, step by step in turn.
"""

import statistics
import time
from dataclasses import dataclass, field

import dmuon
import grids
import step_time
import torch
import torch.distributed as dist
from grids import Grid
from models import Gpt, text_batch
from step_time import CONTEXT, LAYERS, SEQUENCES, WIDTH
from support import Figure, Stopwatch, no_garbage_collection, run_ranks

ROUNDS = 8
TP, HSDP = Grid(shard=2, tp=2), Grid(replicate=2, shard=2)


@dataclass
class Laps:
    """Of one side: per round but the first, by one rank."""

    cpu_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)  # wall time of step()
    loss: list[float] = field(default_factory=list)


def measure() -> list[Figure]:
    return [*tp_figures(), *publish_figures()]


def tp_figures() -> list[Figure]:
    ranks = run_ranks(train_tp, TP.ranks)
    laps = {side: [rank[side] for rank, _ in ranks] for side in ("dmuon", "AdamW")}
    for side, of_ranks in laps.items():
        step_time.check_trained(side, [rank.loss for rank in of_ranks])
    ours, adamw = (cpu_of_job(laps[side]) for side in ("dmuon", "AdamW"))
    gather, wait = (sum(counted[at] for _, counted in ranks) for at in (0, 1))
    per_step = 1e3 * len(ranks) * (ROUNDS - 1)
    return [
        Figure(f"  {TP}: share of tp_gather's time beside backward", 1 - wait / gather),
        Figure("  tp_gather, ms a rank and step", gather / per_step),
        Figure("  of which the training thread waits, ms", wait / per_step),
        Figure(f"  {TP}: a step's CPU time, dmuon / AdamW", ours / adamw),
        Figure("  dmuon, ms of CPU in the job", ours * 1e3),
        Figure("  AdamW, ms of CPU in the job", adamw * 1e3),
    ]


def train_tp() -> tuple[dict[str, Laps], tuple[int, int]]:
    """And the microseconds that gathers took, and that the training thread waited for them."""
    sides = {"dmuon": build(TP), "AdamW": build(TP, dedicated=False)}
    model, before = sides["dmuon"][0], []

    def after(done: int) -> None:
        if done == 1:
            before.append(gather_us(model))

    laps = train_in_turn(sides, TP, after)
    return laps, tuple(b - a for a, b in zip(before[0], gather_us(model)))


def gather_us(model: Gpt) -> tuple[int, int]:
    report = dmuon.report(model)
    return report["tp_gather_us"], report["tp_wait_us"]


def publish_figures() -> list[Figure]:
    ranks = run_ranks(train_hsdp, HSDP.ranks)
    if any(rank["async"].loss != rank["sync"].loss for rank in ranks):
        raise RuntimeError("publishing asynchronously changes the loss")
    steps = {
        side: statistics.median(max(s) for s in zip(*(rank[side].step_s for rank in ranks)))
        for side in ("async", "sync")
    }
    return [
        Figure(
            f"  {HSDP}: wall time of step(), replicate_async / sync", steps["async"] / steps["sync"]
        ),
        Figure("  replicate_async=True, ms", steps["async"] * 1e3),
        Figure("  replicate_async=False, ms", steps["sync"] * 1e3),
    ]


def train_hsdp() -> dict[str, Laps]:
    sides = {name: build(HSDP, replicate_async=name == "async") for name in ("async", "sync")}
    return train_in_turn(sides, HSDP)


def build(grid: Grid, dedicated: bool = True, **muon):
    torch.manual_seed(0)
    model = Gpt(WIDTH, LAYERS, CONTEXT)
    grids.distribute(model, grid, dedicated)
    if dedicated:
        return model, dmuon.Muon(model, **muon)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_in_turn(sides: dict, grid: Grid, after=lambda done: None) -> dict[str, Laps]:
    tokens, targets = text_batch(dist.get_rank() // grid.tp, SEQUENCES, CONTEXT)
    laps = {side: Laps() for side in sides}
    with no_garbage_collection():
        for done in range(ROUNDS):
            for side, (model, optimizer) in sides.items():
                dist.barrier()
                lap(model, optimizer, tokens, targets, laps[side])
            after(done + 1)
    for side in laps.values():
        del side.cpu_s[0], side.step_s[0]  # with their lazy initialisation
    return laps


def lap(model, optimizer, tokens, targets, laps: Laps) -> None:
    watch = Stopwatch()
    loss = model(tokens, targets)
    loss.backward()
    began = time.perf_counter()
    optimizer.step()
    laps.step_s.append(time.perf_counter() - began)
    optimizer.zero_grad()
    dist.barrier()  # what still runs on other threads is charged here
    laps.cpu_s.append(watch.lap().cpu)
    laps.loss.append(loss.item())


def cpu_of_job(ranks: list[Laps]) -> float:
    return statistics.median(sum(laps) for laps in zip(*(rank.cpu_s for rank in ranks)))

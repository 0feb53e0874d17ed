"""Host time: what dmuon adds to a unit of small matrices, beside what FSDP2 adds for the same ones.

One process that believes it is one of four ranks (collectives return at once), so only the work of
the host counts. Three chains of the same units, in turn: the matrices left to nobody, managed by
FSDP2, dedicated. A side's cost is its time minus the first chain's.
"""

import statistics

import dmuon
import torch
from models import Chain, block_matrices, is_block_matrix
from support import (
    Figure,
    Stopwatch,
    Time,
    cpu_mesh,
    median_times,
    no_garbage_collection,
    run_fake_rank,
    shard,
)

WORLD_SIZE = 4
UNITS, MATRICES, SIZE = 8, 7, 16
ROUNDS = 300
STEP_MATRICES, STEP_SIZE, STEP_ROUNDS = 256, 2, 60


def measure() -> list[Figure]:
    return run_fake_rank(unit_figures, WORLD_SIZE) + run_fake_rank(step_figures, WORLD_SIZE)


def unit_figures() -> list[Figure]:
    x = torch.ones(4, SIZE)
    sides = {side: build_chain(side) for side in ("nobody", "fsdp2", "dmuon")}
    times = {side: [] for side in sides}
    for model, optimizer in sides.values():  # lazy initialisation is not what is measured
        forward_backward(model, optimizer, x)
    with no_garbage_collection():
        for _ in range(ROUNDS):
            for side, (model, optimizer) in sides.items():
                times[side].append(forward_backward(model, optimizer, x))
    return describe_units(times)


def build_chain(side: str):
    model, mesh = Chain(UNITS, MATRICES, SIZE), cpu_mesh()
    if side == "dmuon":
        dmuon.dedicate_params(model, mesh, is_block_matrix)
    ignored = set(block_matrices(model).values()) if side == "nobody" else None
    shard(model, model.units, mesh, **({"ignored_params": ignored} if ignored else {}))
    return model, dmuon.Muon(model) if side == "dmuon" else None


def forward_backward(model, optimizer, x) -> tuple[Time, Time]:
    watch = Stopwatch()
    loss = model(x).sum()
    forward = watch.lap()
    loss.backward()
    if optimizer:
        dmuon.wait_all_reduces(model)  # so that work on other threads is charged here
    backward = watch.lap()
    (optimizer or model).zero_grad()
    return forward, backward


def describe_units(times: dict[str, list[tuple[Time, Time]]]) -> list[Figure]:
    forward = {side: median_times([t[0] for t in laps]) for side, laps in times.items()}
    backward = {side: median_times([t[1] for t in laps]) for side, laps in times.items()}

    def added_us(side: str, clock: str, *phases) -> float:
        seconds = sum(getattr(p[side], clock) - getattr(p["nobody"], clock) for p in phases)
        return seconds / UNITS * 1e6

    def ratio(clock: str, *phases) -> float:
        return added_us("dmuon", clock, *phases) / added_us("fsdp2", clock, *phases)

    return [
        Figure(
            "unit of 7: added host time, dmuon / FSDP2 (CPU)", ratio("cpu", forward, backward), 0.3
        ),
        Figure("  the same in wall time", ratio("wall", forward, backward)),
        Figure("  forward alone (CPU)", ratio("cpu", forward)),
        Figure("  backward alone (CPU)", ratio("cpu", backward)),
        Figure("  FSDP2 adds, us a unit", added_us("fsdp2", "cpu", forward, backward)),
        Figure("  dmuon adds, us a unit", added_us("dmuon", "cpu", forward, backward)),
        Figure("  dmuon adds in forward, us a unit", added_us("dmuon", "cpu", forward)),
        Figure("  dmuon adds in backward, us a unit", added_us("dmuon", "cpu", backward)),
    ]


def step_figures() -> list[Figure]:
    """Steps of 1 and 2 iterations, so that one of none follows: Newton-Schulz set aside."""
    sides = {
        "dmuon, 1 iteration": build_step("dmuon", ns_steps=1),
        "dmuon, 2 iterations": build_step("dmuon", ns_steps=2),
        "AdamW": build_step("fsdp2"),
        "AdamW, plain tensors": build_step("plain"),
    }
    x = torch.ones(STEP_SIZE, STEP_SIZE)
    times = {side: [] for side in sides}
    with no_garbage_collection():
        for _ in range(STEP_ROUNDS):
            for side, (model, optimizer) in sides.items():
                times[side].append(one_step(model, optimizer, x))
    seconds = {side: statistics.median(t.cpu for t in laps[1:]) for side, laps in times.items()}
    return describe_step(seconds, owned_count(sides["dmuon, 1 iteration"][0]))


def build_step(side: str, **muon):
    model, mesh = Chain(1, STEP_MATRICES, STEP_SIZE, bias=False), cpu_mesh()
    if side == "dmuon":
        dmuon.dedicate_params(model, mesh, is_block_matrix)
    if side != "plain":
        shard(model, model.units, mesh)
    if side == "dmuon":
        return model, dmuon.Muon(model, nonfinite="propagate", **muon)
    return model, torch.optim.AdamW(model.parameters(), foreach=True)


def one_step(model, optimizer, x) -> Time:
    model(x).sum().backward()
    if isinstance(optimizer, dmuon.Muon):
        dmuon.wait_all_reduces(model)
    watch = Stopwatch()
    optimizer.step()
    lap = watch.lap()
    optimizer.zero_grad()
    return lap


def owned_count(model) -> int:
    return sum(owned.is_owner for owned in dmuon.get_owned_params(model, 0))


def describe_step(seconds: dict[str, float], owned: int) -> list[Figure]:
    once, twice = seconds["dmuon, 1 iteration"], seconds["dmuon, 2 iterations"]
    ours = max(0.0, 2 * once - twice) / owned
    sharded = seconds["AdamW"] / STEP_MATRICES
    plain = seconds["AdamW, plain tensors"] / STEP_MATRICES
    return [
        Figure("step: a matrix's time, dmuon / AdamW(foreach) on plain tensors", ours / plain, 1.0),
        Figure("  the same against AdamW(foreach) under FSDP2", ours / sharded),
        Figure("  dmuon, us an owned matrix", ours * 1e6),
        Figure("  one Newton-Schulz iteration, us an owned matrix", (twice - once) / owned * 1e6),
        Figure("  AdamW(foreach) under FSDP2, us a matrix", sharded * 1e6),
        Figure("  AdamW(foreach) on plain tensors, us a matrix", plain * 1e6),
    ]

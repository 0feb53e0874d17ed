"""The whole step of a small GPT on four ranks: dmuon against AdamW under FSDP2, in CPU time.

Both train in the same processes, step by step in turn. CPU time is summed over the ranks.
"""

import math
import statistics

import dmuon
import torch
import torch.distributed as dist
from models import Gpt, block_matrices, is_block_matrix, text_batch
from support import Figure, Stopwatch, cpu_mesh, no_garbage_collection, run_ranks, shard

WORLD_SIZE = 4
WIDTH, LAYERS, CONTEXT, SEQUENCES = 256, 4, 128, 8
ROUNDS = 12
PHASES = ("forward", "backward", "step")


def measure() -> list[Figure]:
    ranks = run_ranks(train_in_turn, WORLD_SIZE)
    for side in ("dmuon", "AdamW"):
        check_trained(side, [rank[side]["loss"] for rank in ranks])
    seconds = {side: phase_medians([rank[side] for rank in ranks]) for side in ("dmuon", "AdamW")}
    return describe(seconds["dmuon"], seconds["AdamW"], run_ranks(newton_schulz_seconds, 1)[0])


def train_in_turn() -> dict[str, dict[str, list[float]]]:
    """This rank's CPU seconds by side and phase, one per round, and its losses."""
    tokens, targets = text_batch(dist.get_rank(), SEQUENCES, CONTEXT)
    sides = {"dmuon": build(dedicated=True), "AdamW": build(dedicated=False)}
    laps = {side: {phase: [] for phase in (*PHASES, "loss")} for side in sides}
    with no_garbage_collection():
        for _ in range(ROUNDS):
            for side, (model, optimizer) in sides.items():
                dist.barrier()
                train_once(model, optimizer, tokens, targets, laps[side])
    return laps


def build(dedicated: bool):
    torch.manual_seed(0)
    model, mesh = Gpt(WIDTH, LAYERS, CONTEXT), cpu_mesh()
    if dedicated:
        dmuon.dedicate_params(model, mesh, is_block_matrix)
    shard(model, model.units, mesh)
    if dedicated:
        return model, dmuon.Muon(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_once(model, optimizer, tokens, targets, laps: dict[str, list[float]]) -> None:
    watch = Stopwatch()
    loss = model(tokens, targets)
    laps["forward"].append(watch.lap().cpu)
    loss.backward()
    if isinstance(optimizer, dmuon.Muon):
        dmuon.wait_all_reduces(model)  # FSDP2 waits for its reductions inside backward
    laps["backward"].append(watch.lap().cpu)
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()  # what still runs on other threads is charged here
    laps["step"].append(watch.lap().cpu)
    laps["loss"].append(loss.item())


def check_trained(side: str, losses: list[list[float]]) -> None:
    first, last = (statistics.mean(rank[at] for rank in losses) for at in (0, -1))
    if not math.isfinite(last) or last > 0.9 * first:
        raise RuntimeError(f"{side} does not train: its loss went from {first} to {last}")


def phase_medians(ranks: list[dict[str, list[float]]]) -> dict[str, float]:
    """Seconds of the whole job; the first round, with its lazy initialisation, is left out."""
    job = {p: [sum(laps) for laps in zip(*(r[p] for r in ranks))][1:] for p in PHASES}
    job["whole"] = [sum(laps) for laps in zip(*job.values())]
    return {phase: statistics.median(laps) for phase, laps in job.items()}


def job_median(ranks: list[list[float]]) -> float:
    """The median over rounds of what all ranks take together; the first round is left out."""
    return statistics.median([sum(laps) for laps in zip(*ranks)][1:])


def newton_schulz_seconds() -> float:
    """CPU seconds of Newton-Schulz alone, on all matrices of the model in turn."""
    matrices = list(block_matrices(Gpt(WIDTH, LAYERS, CONTEXT)).values())
    laps = []
    for _ in range(ROUNDS):
        watch = Stopwatch()
        for matrix in matrices:
            dmuon.newton_schulz(matrix.detach())
        laps.append(watch.lap().cpu)
    return statistics.median(laps)


def describe(ours: dict[str, float], adamw: dict[str, float], newton_schulz: float) -> list[Figure]:
    limits = {"whole": 1.35, "backward": 1.05}
    figures = [
        Figure(
            f"GPT {phase}: CPU time, dmuon / AdamW", ours[phase] / adamw[phase], limits.get(phase)
        )
        for phase in ("whole", *PHASES)
    ]
    for phase in ("whole", *PHASES):
        figures.append(Figure(f"  {phase}: dmuon, ms of CPU in the job", ours[phase] * 1e3))
        figures.append(Figure(f"  {phase}: AdamW, ms of CPU in the job", adamw[phase] * 1e3))
    return [*figures, Figure("  Newton-Schulz alone, ms of CPU", newton_schulz * 1e3)]

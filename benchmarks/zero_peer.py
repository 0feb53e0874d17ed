"""dmuon beside DeepSpeed's own Muon: the same model, stage and config but for the optimizer, two ranks.

Error: of what a run has done to a matrix that Muon trains, the worst of all, as the norm of the difference over
the norm of the exact change; 1 is as wrong as no training. Exact is one process in float64 with the mathematics
that each claims: its own Newton-Schulz coefficients, momentum and scale; gradients clipped before momentum.
"In one process": the same in float32, the worse of two orders of the batch, and for DeepSpeed's with its
own function of the update, which iterates in half precision where the CPU can: what rounding does.
"AdamW's": the same of the other parameters, the worst of all stages.

Step time: CPU time summed over the ranks, three sides in the same processes, step by step in turn.
"""

from functools import partial

import parity
import step_time
import torch
import torch.distributed as dist
from models import Gpt, block_matrices, is_block_matrix, text_batch
from parity import ADAMW as AUXILIARY
from parity import LIMITS, LR, MOMENTUM, Parameters
from step_time import CONTEXT, LAYERS, SEQUENCES, WIDTH
from support import Figure, Stopwatch, no_garbage_collection, run_ranks
from torch import Tensor, nn
from zero import newton_schulz_calls
from zero_engines import (
    ADAMW,
    OURS,
    STAGES,
    THEIRS,
    WORLD_SIZE,
    config,
    engine_of,
    ready,
    train,
    train_step,
)

SIDES = (OURS, ADAMW, THEIRS)
ROUNDS = 7
CLIPS = (0.0, 1.0)
ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1))  # of a batch's slices


def measure() -> list[Figure]:
    figures = run_ranks(observe_errors, WORLD_SIZE)[0]
    ranks = run_ranks(observe_times, WORLD_SIZE)
    for stage in STAGES:
        figures += time_figures(stage, [times[stage] for times in ranks])
    return figures


def observe_errors() -> list[Figure]:
    ready()
    figures = [Figure("  norm of the gradients of the first step", first_norm())]
    return figures + [figure for clip in CLIPS for figure in error_figures(clip)]


def first_norm() -> float:
    model = parity.initial_model()
    for rank in ORDERS[0]:
        (model(*parity.slice_of_batch(1, rank)) / len(ORDERS[0])).backward()
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def error_figures(clip: float) -> list[Figure]:
    """On the first rank."""
    trained = {
        side: [train(config(side, stage, clip)) for stage in STAGES] for side in (OURS, THEIRS)
    }
    figures = []
    if dist.get_rank() == 0:
        for side, (exactly, roundly) in RULES.items():
            exact = parity.train_by(exactly, torch.float64, ORDERS[0], clip)
            rounded = [parity.train_by(roundly, torch.float32, order, clip) for order in ORDERS]
            for steps in LIMITS:
                after = f"clip {clip or 'off'}, {steps} step{'s' * (steps > 1)}"
                errors = [errors_of(run[steps], exact[steps]) for run in trained[side]]
                floor = max(errors_of(run[steps], exact[steps])[0] for run in rounded)
                figures += describe_errors(side, after, errors, floor)
    dist.barrier()
    return figures


def describe_errors(
    side: str, after: str, errors: list[tuple[float, float]], floor: float
) -> list[Figure]:
    limit, indent = (2 * floor, "") if side == OURS else (None, "  ")
    return [
        *(
            Figure(f"{indent}{side}, ZeRO-{stage}, {after}: error", of_muon, limit)
            for stage, (of_muon, _) in zip(STAGES, errors)
        ),
        Figure(f"  in one process, {after}: error", floor),
        Figure(f"  {side}, {after}: AdamW's error", max(rest for _, rest in errors)),
    ]


def errors_of(some: Parameters, exact: Parameters) -> tuple[float, float]:
    """The worst of what Muon trains, and of what AdamW does."""
    worst = {True: 0.0, False: 0.0}
    for name, start in parity.initial_model().named_parameters():
        change = (exact[name] - start.detach()).norm()
        error = float((some[name].double() - exact[name]).norm() / change)
        by_muon = is_block_matrix(name, start)
        worst[by_muon] = max(worst[by_muon], error)
    return worst[True], worst[False]


@torch.no_grad()
def theirs(matrices: list[Tensor], buffers: list[Tensor]) -> None:
    for weight, buffer in zip(matrices, buffers):
        buffer.lerp_(weight.grad, 1 - MOMENTUM)
        rows, columns = weight.shape
        update = quintic(weight.grad.lerp(buffer, MOMENTUM)) * max(1, rows / columns) ** 0.5
        step_by(weight, update)


def step_by(weight: Tensor, update: Tensor) -> None:
    weight.mul_(1 - LR * AUXILIARY["weight_decay"])
    weight.sub_(update, alpha=LR)


def quintic(matrix: Tensor) -> Tensor:
    """Newton-Schulz with the coefficients of https://kellerjordan.github.io/posts/muon."""
    if matrix.shape[0] > matrix.shape[1]:
        return quintic(matrix.T).T
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@torch.no_grad()
def theirs_as_it_runs(matrices: list[Tensor], buffers: list[Tensor]) -> None:
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    for weight, buffer in zip(matrices, buffers):
        step_by(weight, muon_update(weight.grad, buffer, beta=MOMENTUM))


# How a step is done exactly, and as it is on one rank.
RULES = {
    OURS: tuple(partial(parity.muon, restarts=parity.RESTARTS[f]) for f in ("direct", "gram")),
    THEIRS: (theirs, theirs_as_it_runs),
}


class Counter:
    """Of the calls of DeepSpeed's Newton-Schulz functions on this rank."""

    def __init__(self):
        from deepspeed.runtime.zero.muon import original_muon

        self.calls = 0
        for name in ("zeropower_via_gram_newtonschulz", "zeropower_via_newtonschulz5"):
            setattr(original_muon, name, self._counted(getattr(original_muon, name)))

    def _counted(self, function):
        def counted(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return counted


def observe_times() -> dict[int, dict]:
    ready()
    counter = Counter()
    return {stage: train_in_turn(stage, counter) for stage in STAGES}


def train_in_turn(stage: int, counter: Counter) -> dict[str, dict]:
    """This rank's CPU seconds by side, one per round, its losses and its calls of Newton-Schulz."""
    batch = text_batch(dist.get_rank(), SEQUENCES, CONTEXT)
    engines = {}
    for side in SIDES:
        torch.manual_seed(0)
        engines[side] = engine_of(Gpt(WIDTH, LAYERS, CONTEXT), config(side, stage))
    laps = {side: {"cpu": [], "loss": [], "calls": 0} for side in SIDES}
    counter.calls = 0
    with no_garbage_collection():
        for _ in range(ROUNDS):
            for side, engine in engines.items():
                dist.barrier()
                watch = Stopwatch()
                laps[side]["loss"].append(train_step(engine, *batch).item())
                dist.barrier()  # what still runs on other threads is charged here
                laps[side]["cpu"].append(watch.lap().cpu)
    laps[THEIRS]["calls"] = counter.calls
    laps[OURS]["calls"] = sum(newton_schulz_calls(engines[OURS]))
    for engine in engines.values():
        engine.destroy()
    return laps


def time_figures(stage: int, ranks: list[dict]) -> list[Figure]:
    for side in SIDES:
        step_time.check_trained(side, [rank[side]["loss"] for rank in ranks])
    seconds = {side: step_time.job_median([rank[side]["cpu"] for rank in ranks]) for side in SIDES}
    matrices = len(block_matrices(Gpt(WIDTH, LAYERS, CONTEXT)))
    calls = {s: sum(rank[s]["calls"] for rank in ranks) / ROUNDS / matrices for s in (OURS, THEIRS)}
    name = f"ZeRO-{stage} step: CPU time, dmuon / "
    return [
        *(
            Figure(name + side, seconds[OURS] / seconds[side], limit)
            for side, limit in ((THEIRS, 1.0), (ADAMW, 1.35))
        ),
        *(Figure(f"  {side}, ms of CPU in the job", 1e3 * s) for side, s in seconds.items()),
        Figure(f"ZeRO-{stage}: Newton-Schulz calls of a matrix and step, dmuon", calls[OURS], 1),
        Figure("  DeepSpeed's Muon", calls[THEIRS]),
    ]

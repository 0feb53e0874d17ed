"""DeepSpeed ZeRO, stages 0 to 3, on two ranks: the same numbers as one process, and what moves for it.

Parity: the model and the reference of ``parity``. "Any weight" is the largest difference of any element of
any parameter, against the fixed limits. Relative ones, to each parameter's largest element, have the limits of
``parity``: twice what adding the gradients in another order does in one process in plain torch, where
that is more.

With two ranks a sum has one order, so all stages end with the same bits.

Bytes are of the job and step, P the size of the blocks' matrices and N the number of ranks:

- stages 0 to 2: a sum at one rank and a copy on all, (N-1)P each, channels replicate_reduce and publish;
- stage 3: the weight to whoever computes with it, (N-1)P in forward and again in backward, channel
  materialise, and the sum, channel reduce.

By dmuon's report, and by the kernel's count of the ranks' sockets less a run in which the matrices are
buffers that nobody trains. AdamW and DeepSpeed's own Muon under the same stage are counted likewise.
"""

import dmuon
import parity
import torch
import torch.distributed as dist
import wire_bytes
from models import Chain
from parity import Trained
from support import Figure, run_ranks
from wire_bytes import MATRICES, SIZE, STEPS, UNITS
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
)

NOBODY = "nobody"
RESIDENT = {"replicate_reduce": 1, "publish": 1}  # of each, in units of (N-1)P
BOUNDS = {0: RESIDENT, 1: RESIDENT, 2: RESIDENT, 3: {"materialise": 2, "reduce": 1}}


def measure() -> list[Figure]:
    ranks = run_ranks(observe, WORLD_SIZE)
    figures = list(ranks[0][0])
    for stage in STAGES:
        figures += wire_figures(stage, [counts[stage] for _, counts in ranks])
    return figures


def observe() -> tuple[list[Figure], dict[int, dict]]:
    ready()
    trained = {stage: train(config(OURS, stage)) for stage in STAGES}
    figures = parity_figures(trained) if dist.get_rank() == 0 else []
    dist.barrier()
    return figures, {stage: count_all(stage) for stage in STAGES}


def parity_figures(trained: dict[int, Trained]) -> list[Figure]:
    single, reordered = (
        parity.train_single(torch.float32, "gram", order) for order in ((0, 1, 2, 3), (2, 0, 3, 1))
    )
    figures = []
    for steps, limit in parity.LIMITS.items():
        rounding = parity.difference(reordered[steps], single[steps])
        after = f"{steps} step{'s' * (steps > 1)}"
        for stage in STAGES:
            some, name = trained[stage][steps], f"ZeRO-{stage}, {after}, against one process"
            relative = parity.difference(some, single[steps])
            figures += [
                Figure(f"{name}: any weight", largest(some, single[steps]), limit),
                Figure(f"{name}: relative", relative, max(limit, 2 * rounding)),
            ]
        largest_rounding = largest(reordered[steps], single[steps])
        figures += [
            Figure("  plain torch, summed in another order: any weight", largest_rounding),
            Figure("  plain torch, summed in another order: relative", rounding),
        ]
    names = (f"ZeRO-{stage}, 20 steps, and ZeRO-0: elements that differ" for stage in STAGES[1:])
    same = (parity.bitwise(n, trained[s], trained[0]) for n, s in zip(names, STAGES[1:]))
    return [*figures, *same]


def largest(some: parity.Parameters, other: parity.Parameters) -> float:
    return max((some[name].double() - other[name].double()).abs().max().item() for name in other)


def wire_figures(stage: int, ranks: list[dict]) -> list[Figure]:
    unit = (WORLD_SIZE - 1) * UNITS * MATRICES * SIZE * SIZE * 4
    total = sum(BOUNDS[stage].values())
    sent = {c: sum(rank["sent"][c] for rank in ranks) for c in ranks[0]["sent"]}
    elsewhere = sum(bytes_ for c, bytes_ in sent.items() if c not in (*BOUNDS[stage], "control"))
    calls = [sum(of_matrix) for of_matrix in zip(*(rank["newton_schulz"] for rank in ranks))]
    kernel = {side: sum(rank["kernel"][side] for rank in ranks) for side in (OURS, ADAMW, THEIRS)}
    name = f"ZeRO-{stage}"
    return [
        *(
            Figure(f"{name}: bytes, {c} / bound", sent[c] / (times * unit), 1.01)
            for c, times in BOUNDS[stage].items()
        ),
        Figure(f"{name}: bytes on other channels", elsewhere, 0),
        Figure(f"{name}: bytes, the kernel's count / bound", kernel[OURS] / (total * unit), 1.05),
        Figure(f"  in (N-1)P, the kernel's count: {OURS}", kernel[OURS] / unit),
        Figure(f"  in (N-1)P, the kernel's count: {ADAMW}", kernel[ADAMW] / unit),
        Figure(f"  in (N-1)P, the kernel's count: {THEIRS}", kernel[THEIRS] / unit),
        Figure(
            f"{name}: Newton-Schulz calls of a matrix and step, too many or few",
            max(abs(count - STEPS - 1) for count in calls),
            0,
        ),
    ]


def count_all(stage: int) -> dict:
    """Of this rank: bytes by channel and in the kernel's count, of a step; Newton-Schulz by matrix."""
    told = count(OURS, stage)
    kernel = {side: count(side, stage)["kernel"] for side in (NOBODY, ADAMW, THEIRS)}
    kernel[OURS] = told["kernel"]
    without = kernel.pop(NOBODY)
    told["kernel"] = {side: bytes_ - without for side, bytes_ in kernel.items()}
    return told


def count(side: str, stage: int) -> dict:
    torch.manual_seed(0)
    model = Chain(UNITS, MATRICES, SIZE)
    if side == NOBODY:
        make_buffers(model)
    engine = engine_of(model, config(ADAMW if side == NOBODY else side, stage))
    step(engine)  # what only the first step does is over
    before = channels(engine, side), wire_bytes.kernel_sent_bytes()
    for _ in range(STEPS):
        step(engine)
    after = channels(engine, side), wire_bytes.kernel_sent_bytes()
    told = {
        "sent": {c: (bytes_ - before[0][c]) / STEPS for c, bytes_ in after[0].items()},
        "kernel": (after[1] - before[1]) / STEPS,
        "newton_schulz": newton_schulz_calls(engine) if side == OURS else [],
    }
    engine.destroy()
    return told


def make_buffers(model: Chain) -> None:
    for unit in model.units:
        matrices = unit.matrices
        for name in list(matrices._parameters):
            matrices._buffers[name] = matrices._parameters.pop(name).detach()


def step(engine) -> None:
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = engine(x).square().mean()
    engine.backward(y)
    engine.step()
    dist.barrier()


def channels(engine, side: str) -> dict[str, int]:
    """Bytes sent by now, once what is in flight has landed."""
    if side != OURS:
        return {}
    dmuon.wait_all_replicate_broadcasts(engine)
    return dict(dmuon.report(engine)["sent_bytes_by_channel"])


def newton_schulz_calls(engine) -> list[int]:
    """Of this rank so far, by matrix."""
    return list(dmuon.runtime.runtime_of(engine).optimizer().dedicated.ns_calls_per_matrix())

"""DDP: what it costs to own each matrix once where every rank has the whole weights.

Bytes are of the job and step, in units of 2(N-1)P, which is a sum at one rank and a copy on all: P is
the size of the blocks' matrices. By dmuon's report and by the kernel's count of the ranks' sockets,
less a run in which nobody moves the matrices.

Step time is CPU time summed over four ranks, three sides in the same processes, step by step in turn:
dmuon, AdamW, and torch.optim.Muon, which runs Newton-Schulz of every matrix on every rank. All three
average gradients of what is not dedicated by torch's DistributedDataParallel.
"""

import statistics

import dmuon
import step_time
import torch
import torch.distributed as dist
import wire_bytes
from models import Chain, Gpt, block_matrices, is_block_matrix, text_batch
from step_time import CONTEXT, LAYERS, PHASES, ROUNDS, SEQUENCES, WIDTH, WORLD_SIZE
from support import Figure, Optimizers, Stopwatch, cpu_mesh, no_garbage_collection, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wire_bytes import MATRICES, SIZE, STEPS, UNITS

SIDES = ("dmuon", "AdamW", "replicated Muon")


def measure() -> list[Figure]:
    figures = [f for world_size in wire_bytes.WORLD_SIZES for f in wire_figures(world_size)]
    return figures + time_figures()


def wire_figures(world_size: int) -> list[Figure]:
    ranks = run_ranks(count_all, world_size)
    reported, kernel, adamw, calls = (sum(rank[at] for rank in ranks) for at in range(4))
    unit = 2 * (world_size - 1) * UNITS * MATRICES * SIZE * SIZE * 4
    return [
        Figure(f"DDP wire, N={world_size}: report", reported / unit, 1.01),
        Figure(f"DDP wire, N={world_size}: kernel", kernel / unit, 1.05),
        Figure("  DDP with AdamW: kernel", adamw / unit),
        Figure("  Newton-Schulz calls too many or too few", abs(calls - UNITS * MATRICES), 0),
    ]


def count_all() -> tuple[float, float, float, int]:
    """This rank's bytes in a step, as dmuon reports them, as the kernel saw dmuon's and AdamW's; and
    how often this rank ran Newton-Schulz in it."""
    _, nobody, _ = count("nobody")
    reported, ours, calls = count("dmuon")
    _, adamw, _ = count("AdamW")
    return reported, ours - nobody, adamw - nobody, calls


def count(side: str) -> tuple[float, float, int]:
    torch.manual_seed(0)
    wrapped, optimizer = build(Chain(UNITS, MATRICES, SIZE), side)
    wire_bytes.train(wrapped, optimizer)
    before = reported_and_kernel(wrapped, side)
    for _ in range(STEPS):
        wire_bytes.train(wrapped, optimizer)
    after = reported_and_kernel(wrapped, side)
    calls = dmuon.report(wrapped)["ns_calls_last_step"] if side == "dmuon" else 0
    return *((b - a) / STEPS for a, b in zip(before, after)), calls


def reported_and_kernel(wrapped: nn.Module, side: str) -> tuple[int, int]:
    """Bytes that this rank has sent by now, once what is in flight has landed."""
    reported = 0
    if side == "dmuon":
        dmuon.wait_all_replicate_broadcasts(wrapped)
        sent = dmuon.report(wrapped)["sent_bytes_by_channel"]
        reported = sent["replicate_reduce"] + sent["publish"]
    return reported, wire_bytes.kernel_sent_bytes()


def build(model: nn.Module, side: str):
    """The wrapper and the optimizer of one side; "nobody" leaves the matrices alone."""
    matrices = block_matrices(model)
    rest = [p for n, p in model.named_parameters() if not is_block_matrix(n, p)]
    if side == "dmuon":
        dmuon.dedicate_params_ddp(model, cpu_mesh(), is_block_matrix)
        wrapped = DistributedDataParallel(model)
        return wrapped, dmuon.Muon(wrapped)
    if side == "nobody":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(matrices))
        return DistributedDataParallel(model), torch.optim.AdamW(rest)
    wrapped = DistributedDataParallel(model)
    if side == "AdamW":
        return wrapped, torch.optim.AdamW(model.parameters(), lr=1e-3)
    return wrapped, Optimizers(torch_muon(matrices.values()), torch.optim.AdamW(rest, lr=1e-3))


def torch_muon(matrices) -> torch.optim.Muon:
    return torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")


def time_figures() -> list[Figure]:
    ranks = run_ranks(train_in_turn, WORLD_SIZE)
    for side in SIDES:
        step_time.check_trained(side, [rank[side]["loss"] for rank in ranks])
    seconds = {side: step_time.phase_medians([rank[side] for rank in ranks]) for side in SIDES}
    limits = {("whole", "replicated Muon"): 1.0, ("whole", "AdamW"): 1.35}
    figures = [
        Figure(
            f"DDP {phase}: CPU time, dmuon / {other}",
            seconds["dmuon"][phase] / seconds[other][phase],
            limits.get((phase, other)),
        )
        for other in SIDES[1:]
        for phase in ("whole", *PHASES)
    ]
    figures += [
        Figure(f"  {phase}: {side}, ms of CPU in the job", seconds[side][phase] * 1e3)
        for phase in ("whole", *PHASES)
        for side in SIDES
    ]
    alone = {
        "dmuon.newton_schulz": run_ranks(step_time.newton_schulz_seconds, 1)[0],
        "a step of torch.optim.Muon": run_ranks(torch_muon_seconds, 1)[0],
    }
    return figures + [
        Figure(f"  in one process: {what}, ms of CPU", s * 1e3) for what, s in alone.items()
    ]


def torch_muon_seconds() -> float:
    """CPU seconds of one step on all matrices of the model."""
    matrices = list(block_matrices(Gpt(WIDTH, LAYERS, CONTEXT)).values())
    optimizer, laps = torch_muon(matrices), []
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    for _ in range(ROUNDS):
        watch = Stopwatch()
        optimizer.step()
        laps.append(watch.lap().cpu)
    return statistics.median(laps)


def train_in_turn() -> dict[str, dict[str, list[float]]]:
    """This rank's CPU seconds by side and phase, one per round, and its losses."""
    tokens, targets = text_batch(dist.get_rank(), SEQUENCES, CONTEXT)
    sides = {}
    for side in SIDES:
        torch.manual_seed(0)
        sides[side] = build(Gpt(WIDTH, LAYERS, CONTEXT), side)
    laps = {side: {phase: [] for phase in (*PHASES, "loss")} for side in SIDES}
    with no_garbage_collection():
        for _ in range(ROUNDS):
            for side, (wrapped, optimizer) in sides.items():
                dist.barrier()
                step_time.train_once(wrapped, optimizer, tokens, targets, laps[side])
    return laps

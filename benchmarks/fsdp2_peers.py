"""Other ways to run Muon under FSDP2, beside dmuon: bytes, Newton-Schulz calls, CPU time of a step.

- gathering: momentum in shards; each update is made whole on every rank, orthogonalised there, and each rank keeps its
  shard. With dmuon's kernel, so that the difference is the repetition.
- torch.optim.Muon: given FSDP2's DTensors as they are; DTensor's own rules decide what moves.

Bytes are of the job and step, in units of (N-1)P, P the size of the matrices in float32, as the kernel counts them on
the ranks' sockets, less a run in which nobody moves the matrices. gloo's reduce-scatter moves 2(N-1)P where the least is
(N-1)P; "FSDP2 alone" says what of it is not the optimizer's. Step time: CPU time summed over the ranks, of larger matrices, the
sides in turn in the same processes.
"""

import statistics

import dmuon
import torch
import wire_bytes
from models import Chain, block_matrices, is_block_matrix
from support import Figure, Optimizers, Stopwatch, cpu_mesh, no_garbage_collection, run_ranks, shard
from torch.distributed.tensor import DTensor, distribute_tensor
from wire_bytes import MATRICES, SIZE, STEPS, UNITS

SIDES = ("dmuon", "gathering", "torch.optim.Muon")
WORLD_SIZES = (2, 4)
ROUNDS, LARGER = 7, 512
LR, MOMENTUM = 0.02, 0.95
LIMIT = 2e-3  # of the Gram form in float32 where a gradient lacks rank: docs/newton_schulz.md


def measure() -> list[Figure]:
    return [figure for world_size in WORLD_SIZES for figure in figures_of(world_size)]


def figures_of(world_size: int) -> list[Figure]:
    where = f"FSDP2, N={world_size}"
    unit = (world_size - 1) * UNITS * MATRICES * SIZE * SIZE * 4
    ranks = run_ranks(count_all, world_size)
    base = sum(rank["nobody"][0] for rank in ranks)
    sent = {side: (sum(r[side][0] for r in ranks) - base) / unit for side in ("AdamW", *SIDES)}
    calls = {side: sum(r[side][1] for r in ranks) / (UNITS * MATRICES) for side in SIDES[:2]}
    apart = max(rank["apart"] for rank in ranks)
    times = run_ranks(step_times, world_size)
    cpu = {side: sum(rank[side] for rank in times) for side in SIDES}
    return [
        Figure(f"  {where}: bytes in (N-1)P, FSDP2 alone (AdamW)", sent["AdamW"]),
        *(Figure(f"  {where}: bytes in (N-1)P, {side}", sent[side]) for side in SIDES),
        Figure(f"{where}: updates of dmuon and gathering differ by", apart, LIMIT),
        *(Figure(f"  {where}: Newton-Schulz calls of a matrix, {s}", calls[s]) for s in calls),
        *(
            Figure(f"  {where}: step's CPU time, {side} / dmuon", cpu[side] / cpu["dmuon"])
            for side in SIDES[1:]
        ),
    ]


class Gathering(torch.optim.Optimizer):
    """Newton-Schulz on every rank."""

    def __init__(self, params):
        super().__init__(params, {"lr": LR, "momentum": MOMENTUM})
        self.ns_calls_last_step = 0

    @torch.no_grad()
    def step(self) -> None:
        matrices = self.param_groups[0]["params"]
        for p in matrices:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            buffer = state["momentum_buffer"].mul_(MOMENTUM).add_(p.grad)
            whole = (p.grad + MOMENTUM * buffer).full_tensor()
            update = dmuon.gram_newton_schulz(whole).mul_(0.2 * max(p.shape) ** 0.5)
            p.sub_(LR * shard_of(update, p))
        self.ns_calls_last_step = len(matrices)


def shard_of(whole: torch.Tensor, like):
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def build(side: str, size: int = SIZE):
    torch.manual_seed(0)
    model, mesh = Chain(UNITS, MATRICES, size), cpu_mesh()
    if side == "dmuon":
        dmuon.dedicate_params(model, mesh, is_block_matrix)
    ignored = {"ignored_params": set(block_matrices(model).values())} if side == "nobody" else {}
    shard(model, model.units, mesh, **ignored)
    if side == "dmuon":
        return model, dmuon.Muon(model, lr=LR)
    matrices = list(block_matrices(model).values())
    rest = torch.optim.AdamW([p for n, p in model.named_parameters() if not is_block_matrix(n, p)])
    if side == "nobody":
        return model, rest
    muon = {"AdamW": torch.optim.AdamW, "gathering": Gathering}.get(side, torch_muon)(matrices)
    return model, Optimizers(muon, rest)


def torch_muon(matrices) -> torch.optim.Muon:
    return torch.optim.Muon(matrices, lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")


def count_all() -> dict[str, tuple[float, int]]:
    """By side: bytes that this rank has sent in a step, and how often it ran Newton-Schulz. "apart": the largest
    relative difference of what dmuon and gathering have done to a matrix."""
    counted, weights = {}, {}
    for side in ("nobody", "AdamW", *SIDES):
        *counted[side], weights[side] = count(side)
    start = torch.eye(SIZE)
    pairs = [(weights["dmuon"][n], weights["gathering"][n]) for n in weights["dmuon"]]
    return counted | {"apart": max(float((a - b).norm() / (a - start).norm()) for a, b in pairs)}


def count(side: str) -> tuple[float, int, dict[str, torch.Tensor]]:
    model, optimizer = build(side)
    wire_bytes.train(model, optimizer)
    before = wire_bytes.kernel_sent_bytes()
    for _ in range(STEPS):
        wire_bytes.train(model, optimizer)
    sent = (wire_bytes.kernel_sent_bytes() - before) / STEPS
    weights = {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in block_matrices(model).items()
    }
    if side == "dmuon":
        whole = dmuon.get_model_state_dict(model, rank0_only=False)
        weights = {name: whole[name] for name in weights}
    return sent, calls_of(side, model, optimizer), weights


def calls_of(side: str, model, optimizer) -> int:
    if side == "dmuon":
        return dmuon.report(model)["ns_calls_last_step"]
    return optimizer.all[0].ns_calls_last_step if side == "gathering" else 0


def step_times() -> dict[str, float]:
    """Median CPU seconds of this rank in a step, the sides in turn."""
    sides = {side: build(side, LARGER) for side in SIDES}
    laps: dict[str, list[float]] = {side: [] for side in SIDES}
    with no_garbage_collection():
        for _ in range(ROUNDS):
            for side, (model, optimizer) in sides.items():
                x = torch.randn(4, LARGER)
                model(x).square().mean().backward()
                torch.distributed.barrier()
                watch = Stopwatch()
                optimizer.step()
                laps[side].append(watch.lap().cpu)
                optimizer.zero_grad()
    return {side: statistics.median(times) for side, times in laps.items()}

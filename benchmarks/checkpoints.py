"""Saving and loading, beside plain ``torch.distributed.checkpoint`` with the very same tensors.

Two ranks, FSDP2: 24 matrices of 1024 x 1024 with their momenta, and an embedding with AdamW's state, 275 MB.
Plain DCP gets what each rank holds, as ordinary tensors and DTensors by the same names, so that all sides
write the same bytes to the same disk. They take turns; a figure is the median over the rounds of what it is
called, of the ranks together, against plain DCP's. CPU time, because the disk is the same for all and its
time varies by more than their difference; the wall time is beside it. Files are in the page cache when they
are loaded, where checking them costs the most.
"""

import ctypes
import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import dmuon
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import is_block_matrix
from support import Figure, Stopwatch, Time, cpu_mesh, run_ranks, shard
from torch import nn

WORLD_SIZE, UNITS, WIDTH, ROWS, ROUNDS = 2, 24, 1024, 6000, 5
LIMIT = 1 / 0.9  # of plain DCP's time: at least 0.9 of its throughput
SIDES = ("plain DCP", "dmuon.state_dict", "save_checkpoint")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(ROWS, WIDTH)
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))

    def forward(self, x):
        x = self.tokens(x)
        for unit in self.units:
            x = unit(x)
        return x


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(timed, WORLD_SIZE, folder)
    figures = []
    for what in ("save", "load"):
        of = {side: together([times[what, side] for times, *_ in ranks]) for side in SIDES}
        plain = of.pop("plain DCP")
        for side, time in of.items():
            call = "dcp of dmuon.state_dict" if side == "dmuon.state_dict" else f"{what}_checkpoint"
            name = f"checkpoints: {what}, {call} / plain DCP (CPU)"
            figures.append(Figure(name, time.cpu / plain.cpu, LIMIT))
            figures.append(Figure("  the same in wall time", time.wall / plain.wall))
        figures.append(Figure(f"  plain DCP: {what}, ms of CPU in the job", 1000 * plain.cpu))
    _, shares, _, total = ranks[0]
    figures.append(Figure("  MB in the job", total / 1e6))
    for side, share in shares.items():
        figures.append(Figure(f"checkpoints: {side}, most bytes of a rank / mean", share, 1.15))
    worst = max(held for *_, held, _ in ranks)
    figures.append(
        Figure("checkpoints: memory during save_checkpoint / bytes of a rank", worst, 0.1)
    )
    return figures


def together(ranks: list[list[Time]]) -> Time:
    """CPU time is the sum over ranks, wall time the slowest one's; the median of the rounds."""
    rounds = list(zip(*ranks))
    cpu = statistics.median(sum(t.cpu for t in times) for times in rounds)
    return Time(cpu, statistics.median(max(t.wall for t in times) for times in rounds))


def timed(folder: str):
    """This rank's times by what was done and by whom, shares of the ranks, memory beyond, bytes of the job."""
    model, optimizer = build()
    sides = ways(model, optimizer)
    times = {(what, side): [] for what in ("save", "load") for side in SIDES}
    for number in range(ROUNDS + 1):
        for i in range(2):
            for side, way in sides.items():
                path, what = Path(folder, side), ("save", "load")[i]
                if i == 0:
                    make_empty(path)
                time = lap(way[i], path)
                if number:  # the first round warms up
                    times[what, side].append(time)
    files = {side: list(Path(folder, side).rglob(pattern)) for side, pattern in PATTERNS.items()}
    sizes = {side: [f.stat().st_size for f in found] for side, found in files.items()}
    shares = {side: max(s) * WORLD_SIZE / sum(s) for side, s in sizes.items()}
    total = sum(sizes["save_checkpoint"])
    make_empty(Path(folder, "save_checkpoint"))
    grown = growth(lambda: sides["save_checkpoint"][0](Path(folder, "save_checkpoint")))
    return times, shares, grown / (total / WORLD_SIZE), total


PATTERNS = {"dmuon.state_dict": "*.distcp", "save_checkpoint": "*.data"}


def build():
    model, mesh = Net(), cpu_mesh()
    dmuon.dedicate_params(model, mesh, is_block_matrix)
    shard(model, model.units, mesh)
    optimizer = dmuon.Muon(model)
    model(torch.arange(16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def ways(model, optimizer) -> dict[str, tuple[Callable, Callable]]:
    """How each side saves and loads."""
    state = dmuon.state_dict(model, optimizer)
    mine = {key: value for key, value in flattened(state) if type(value).__name__ != "OwnedTensor"}
    return {
        "plain DCP": (
            lambda path: dcp.save(mine, checkpoint_id=path),
            lambda path: dcp.load(mine, checkpoint_id=path),
        ),
        "dmuon.state_dict": (
            lambda path: dcp.save({"app": state}, checkpoint_id=path),
            lambda path: dcp.load({"app": state}, checkpoint_id=path),
        ),
        "save_checkpoint": (
            lambda path: dmuon.save_checkpoint(path, 1, model, optimizer),
            lambda path: dmuon.load_checkpoint(path, model, optimizer),
        ),
    }


def flattened(state):
    yield from state["model"].items()
    for name, entry in state["optim"]["state"].items():
        yield from ((f"{name}.{key}", value) for key, value in entry.items())


def make_empty(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    dist.barrier()


def lap(work: Callable, path: Path) -> Time:
    dist.barrier()
    watch = Stopwatch()
    work(path)
    time = watch.lap()
    dist.barrier()
    return time


def growth(work: Callable) -> int:
    """Bytes by which the process is larger at most meanwhile than before; of what is freed at once again
    the C library keeps nothing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
    before = peak_bytes()
    work()
    return peak_bytes() - before


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

"""What the figures share: how a figure is told, how ranks are started, how times are compared.

Times are compared as ratios of medians over interleaved repeats of one run, never singly: the
machine may be busy with something else, and then it is for all sides. CPU time counts all threads.
"""

import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

RANK_TIMEOUT_S = 240


@dataclass
class Figure:
    """One line of the table. Without a limit it is there to compare with, or to explain another."""

    name: str
    measured: float
    limit: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.limit is None else self.measured <= self.limit


def run_ranks(function: Callable, world_size: int, *args) -> list:
    """What ``function(*args)`` returned on each rank of a gloo job, in rank order.

    Ranks are forked, so that torch is imported once for all figures. The caller must not have
    started torch's threads: do all tensor work inside ranks, also that of one process.

    Raises:
        RuntimeError: a rank raised, died or took more than ``RANK_TIMEOUT_S``; all are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(function, args, lambda rank: _join_gloo(rank, world_size, folder), world_size)


def run_fake_rank(function: Callable, world_size: int, *args):
    """What ``function(*args)`` returned in one process that takes itself for rank 0 of several.

    Collectives return at once and move nothing, so what is left is the work of the host.
    """
    return _run(function, args, lambda rank: _join_fake(world_size), 1)[0]


def _join_gloo(rank: int, world_size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
    )


def _join_fake(world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def _run(function: Callable, args: tuple, join: Callable[[int], None], count: int) -> list:
    sys.stdout.flush()
    context = multiprocessing.get_context("fork")
    readers, ranks = [], []
    for rank in range(count):
        reader, writer = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_rank, args=(writer, function, args, join, rank)))
        ranks[-1].start()
        writer.close()  # so that a rank that dies ends its pipe, here and in later forks
        readers.append(reader)
    try:
        return _collect(readers)
    finally:
        for process in ranks:
            process.terminate()
            process.join()


def _rank(writer: Connection, function: Callable, args: tuple, join: Callable, rank: int) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        join(rank)
        writer.send((True, function(*args)))
    except BaseException:
        writer.send((False, traceback.format_exc()))
    # No clean shutdown: a rank that failed would wait there for the others.
    sys.stdout.flush()
    writer.close()
    time.sleep(RANK_TIMEOUT_S)


def _collect(readers: list[Connection]) -> list:
    results = {}
    deadline = time.monotonic() + RANK_TIMEOUT_S
    while len(results) < len(readers):
        pending = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = wait(pending, max(0, deadline - time.monotonic()))
        if not ready:
            silent = [readers.index(reader) for reader in pending]
            raise RuntimeError(f"ranks {silent} gave no result in {RANK_TIMEOUT_S} s")
        for reader in ready:
            results[readers.index(reader)] = _receive(reader, readers.index(reader))
    return [results[rank] for rank in range(len(readers))]


def _receive(reader: Connection, rank: int):
    try:
        succeeded, result = reader.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died without a word") from None
    if not succeeded:
        raise RuntimeError(f"rank {rank} failed:\n{result}")
    return result


def cpu_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard(model: torch.nn.Module, units, mesh: DeviceMesh, **keywords) -> None:
    """FSDP2 as a script applies it: each unit, then the root."""
    for unit in units:
        fully_shard(unit, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)


@dataclass
class Time:
    cpu: float  # seconds, all threads of this process
    wall: float


class Stopwatch:
    """Laps of CPU and wall time."""

    def __init__(self):
        self._start()

    def lap(self) -> Time:
        cpu, wall = self._cpu, self._wall
        self._start()
        return Time(self._cpu - cpu, self._wall - wall)

    def _start(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()


def median_times(times: list[Time]) -> Time:
    return Time(statistics.median(t.cpu for t in times), statistics.median(t.wall for t in times))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection inside one side's repeat would be charged to that side alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Optimizers:
    """Several as one."""

    def __init__(self, *optimizers):
        self.all = optimizers

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad()

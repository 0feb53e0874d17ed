"""Runs a function on several ranks over gloo, in processes that are kept for the whole session.

A clean server process imports torch once and forks the ranks, so a pool of four costs about a
second, and a call milliseconds. `fn` is a top-level function of an importable module; each rank
calls `fn(rank, world_size, *args)` with the default process group ready and the seed set to 0.
The first failure is raised here with its rank and traceback; after any failure, time-out or death
the ranks of that size are killed and the next call gets fresh ones.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = float(os.environ.get("DMUON_TEST_PATIENCE", "1"))  # factor of every time limit
GRACE_S = 3.0 * PATIENCE  # how long the other ranks may still report after the first failure
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "torch.testing",
    "pytest",
]

_pools = {}


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time. `rank` is the first one, or None."""

    def __init__(self, text, rank=None):
        super().__init__(text)
        self.rank = rank


def retire(world_size):
    """Ends the ranks of that size: after a task that leaves them unequal, such as groups made on
    some of them only, which the names of later groups depend on."""
    if world_size in _pools:
        _pools.pop(world_size).kill()


def run_ranks(fn, world_size, *args, limit_s=30.0):
    """Calls `fn(rank, world_size, *args)` on every rank; returns the results in rank order."""
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    try:
        return _pools[world_size].call((fn.__module__, fn.__qualname__, args), limit_s)
    except BaseException:
        retire(world_size)
        raise


def run_as_torchrun(fn, world_size, *args, limit_s=60.0):
    """The same on ranks of their own, whose default group `fn` makes: scripts, which end with them."""
    pool = Pool(world_size, _free_port())
    try:
        return pool.call((fn.__module__, fn.__qualname__, args), limit_s)
    finally:
        pool.kill()


def run_fresh(script, world_size, limit_s=90.0):
    """Runs the text `script` in brand-new interpreters, `env://` set; returns what each printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        return _run_scripts(path, world_size, time.monotonic() + limit_s * PATIENCE)


def _run_scripts(path, world_size, deadline):
    shared = (
        os.environ
        | ENVIRONMENT
        | {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env=shared | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    try:
        return [_output(rank, p, deadline) for rank, p in enumerate(processes)]
    finally:
        for p in processes:
            p.kill()
            p.wait()


def _output(rank, process, deadline):
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RankFailure(f"rank {rank} of the script did not end in time", rank) from None
    if process.returncode != 0:
        text = f"rank {rank} of the script ended with {process.returncode}:\n{err}"
        raise RankFailure(text, rank)
    return out


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Pool:
    """The processes of one world size, and a pipe to each."""

    def __init__(self, world_size, port=None):
        os.environ.update(ENVIRONMENT)  # the server inherits it; OpenMP reads it once
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.mkdtemp(prefix="dmuon-ranks-")
        self.processes, self.pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, self.folder, theirs, port), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self._collect(time.monotonic() + 60.0 * PATIENCE, "start")

    def call(self, task, limit_s):
        for pipe in self.pipes:
            pipe.send(task)
        return self._collect(time.monotonic() + limit_s * PATIENCE, f"{task[0]}.{task[1]}")

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _collect(self, deadline, what):
        results, failures = {}, []
        pending = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._failure(what, failures, list(pending.values()))
            for pipe in ready:
                rank = pending.pop(pipe)
                ok, value = self._receive(pipe, rank)
                if ok:
                    results[rank] = value
                else:
                    failures.append((rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise self._failure(what, failures, [])
        return [results[rank] for rank in sorted(results)]

    def _receive(self, pipe, rank):
        try:
            return pipe.recv()
        except EOFError:
            self.processes[rank].join(GRACE_S)
            return False, f"died with exit code {self.processes[rank].exitcode}{self._log(rank)}"

    def _failure(self, what, failures, silent):
        self._dump_stacks(silent)
        lines = [f"{what} failed"]
        lines += [f"rank {rank}: {text}" for rank, text in failures]
        lines += [f"rank {rank} did not answer in time{self._log(rank)}" for rank in silent]
        return RankFailure("\n".join(lines), failures[0][0] if failures else None)

    def _dump_stacks(self, ranks):
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.3)

    def _log(self, rank):
        path = Path(self.folder, f"{rank}.log")
        text = path.read_text(errors="replace")[-6000:] if path.exists() else ""
        return f"; its output ends with\n{text}" if text else ""


@atexit.register
def _close_all():
    while _pools:
        _pools.popitem()[1].kill()


def _serve(*arguments):
    from tests.support import rank_process

    rank_process.serve(*arguments)

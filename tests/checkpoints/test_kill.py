"""kill -9 at every call of a save that changes a file: a checkpoint is there, the old or the new one.

A server that has imported torch and the preloaded `kill_at.c` forks one process per call. Each loads the
checkpoint that is there, trains one step and saves; the n-th call kills it.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import dmuon
import pytest
import torch
import torch.distributed as dist

from tests.checkpoints.kinds import assert_same, start, whole
from tests.support.ranks import ENVIRONMENT, PATIENCE, ROOT, run_ranks

HERE = Path(__file__).parent
OLD, NEW, KEPT = 5, 6, 2


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    path = tmp_path_factory.mktemp("shim") / "kill_at.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    command = [compiler, "-xc", "-shared", "-fPIC", "-O1", HERE / "kill_at.c", "-o", path, "-ldl"]
    subprocess.run(command, check=True)
    return path


def test_a_save_killed_at_any_call_leaves_the_old_or_the_new_checkpoint_whole(shim, tmp_path):
    run_ranks(first_checkpoints, 1, str(tmp_path / "first"))
    points = walk(shim, tmp_path, world_size=1, points=range(1, 10_000))
    assert len(points) >= 20, "the shim did not see the save"
    newest = run_ranks(check_left_behind, 1, str(tmp_path), points, limit_s=120.0)
    assert newest[0][0] == OLD and newest[0][-1] == NEW, newest


def test_of_two_ranks_either_may_be_killed(shim, tmp_path):
    run_ranks(first_checkpoints, 2, str(tmp_path / "first"))
    points = walk(shim, tmp_path, world_size=2, points=(1, 3, 6, 9, 12))
    run_ranks(check_left_behind, 2, str(tmp_path), points, limit_s=120.0)


def first_checkpoints(rank, world_size, root):
    """Steps 3, 4 and 5, of which a save with keep_last removes the first; and what a crash leaves."""
    run = start("alone" if world_size == 1 else "fsdp2")
    for step in range(3, OLD + 1):
        run.train(step)
        dmuon.save_checkpoint(root, step, run.model, run.optimizer)
    if rank == 0:
        shutil.copytree(f"{root}/step_0000000004", f"{root}/.step_0000000002.part")


def walk(shim, tmp_path, world_size, points):
    """One directory per point, as a save left it that was killed there; ends with the first that was not."""
    environment = (
        os.environ
        | ENVIRONMENT
        | {
            "LD_PRELOAD": str(shim),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
    )
    task = json.dumps([str(shim), str(tmp_path), world_size, list(points)])
    code = "import sys; from tests.checkpoints.test_kill import drive; drive(*__import__('json').loads(sys.argv[1]))"
    told = subprocess.run(
        [sys.executable, "-c", code, task],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def drive(shim, folder, world_size, points):
    """Runs in a fresh interpreter, which has no process group yet, so that its forks can make one."""
    done = []
    for n in points:
        root = Path(folder, f"killed{n}")
        shutil.copytree(f"{folder}/first", root)
        statuses = [forked(shim, root, rank, world_size, n) for rank in range(world_size)]
        statuses = [os.waitpid(child, 0)[1] for child in statuses]
        done.append(n)
        victim = os.WTERMSIG(statuses[n % world_size])
        if statuses[n % world_size] == 0 and world_size == 1:
            break
        assert victim == signal.SIGKILL or world_size > 1, f"point {n}: {statuses}"
    print(json.dumps(done))


def forked(shim, root, rank, world_size, n):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        save_once(ctypes.CDLL(shim), root, rank, world_size, n)
        status = 0
    except (RuntimeError, ValueError):  # its peer was killed
        status = 3
    finally:
        os._exit(status)


def save_once(library, root, rank, world_size, n):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}.store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    run = start("alone" if world_size == 1 else "fsdp2")
    dmuon.load_checkpoint(root, run.model, run.optimizer)
    run.train(NEW)
    library.watch(str(root).encode(), ctypes.c_long(n if rank == n % world_size else 0))
    dmuon.save_checkpoint(root, NEW, run.model, run.optimizer, keep_last=KEPT)


def check_left_behind(rank, world_size, folder, points):
    """What each point left loads as the old or the new one, bit for bit; the next save cleans up."""
    kind = "alone" if world_size == 1 else "fsdp2"
    want, run, newest = expected(kind, f"{folder}/first"), start(kind), []
    for n in points:
        root = Path(folder, f"killed{n}")
        found = dmuon.load_checkpoint(root, run.model, run.optimizer)
        assert found.step in want, n
        assert_same(whole(run), want[found.step])
        newest.append(found.step)
        dmuon.save_checkpoint(root, 9, run.model, run.optimizer, keep_last=1)
        assert sorted(os.listdir(root)) == [".lock", "step_0000000009"], (
            f"point {n}: {os.listdir(root)}"
        )
    return newest


def expected(kind, root):
    run = start(kind)
    dmuon.load_checkpoint(root, run.model, run.optimizer)
    want = {OLD: whole(run)}
    run.train(NEW)
    return want | {NEW: whole(run)}

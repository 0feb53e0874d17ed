"""What runs in one process of the pool of `ranks.py`: take a task, run it, clean up, answer."""

import datetime
import faulthandler
import gc
import importlib
import os
import resource
import signal
import sys
import traceback

import torch
import torch.distributed as dist

KEPT = ("dmuon", "mesh_")


def serve(rank, world_size, folder, pipe, port=None):
    """With a `port` the default group is left to the tasks: the environment is torchrun's."""
    _redirect_output(f"{folder}/{rank}.log")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    torch.set_num_threads(1)
    if port is None:
        _make_group(rank, world_size, folder)
    else:
        os.environ |= as_torchrun(rank, world_size, port)
    gc.collect()
    gc.freeze()
    pipe.send((True, None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)  # the parent is gone
        pipe.send(_answer(rank, world_size, *task))


def _make_group(rank, world_size, folder):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )


def as_torchrun(rank, world_size, port):
    """The environment of a script."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _redirect_output(path):
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _answer(rank, world_size, module, qualname, args):
    try:
        torch.manual_seed(0)
        result = getattr(importlib.import_module(module), qualname)(rank, world_size, *args)
        _clean()
        return True, result
    except BaseException:
        return False, traceback.format_exc()


def _clean():
    """Frees what the task left: reference cycles first, then its process groups, on all ranks.

    Those of dmuon stay: it makes them once per set of ranks and uses them for every model. Those of
    mesh axes stay too: DTensor remembers what it has worked out by meshes that compare equal, and
    goes on with the groups of the first one.
    """
    gc.collect()
    if not dist.is_initialized():
        return
    dist.barrier()
    world = dist.distributed_c10d._world
    for group in [g for g in world.pg_map if g is not dist.group.WORLD]:
        if not group.group_desc.startswith(KEPT) or group.group_desc == "mesh_default":
            dist.destroy_process_group(group)
    torch.set_default_dtype(torch.float32)

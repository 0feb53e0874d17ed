"""save_checkpoint: what it keeps and removes, what it refuses, and what a failure leaves."""

import builtins
import contextlib
import errno
import os
import resource
from pathlib import Path
from unittest import mock

import dmuon
import numpy as np
import torch
from dmuon import manifest, safe_storage

from tests.checkpoints.kinds import assert_same, start, train, whole
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks

# What is kept ----------------------------------------------------------------------------------


def test_the_newest_are_kept_and_the_one_just_saved_always(tmp_path):
    run_ranks(check_kept, 2, str(tmp_path))


def check_kept(rank, world_size, root):
    run = start("fsdp2")
    for step in (10, 2, 30):
        dmuon.save_checkpoint(root, step, run.model, run.optimizer)
    assert kept(root) == [2, 10, 30]
    path = dmuon.save_checkpoint(root, 4, run.model, run.optimizer, keep_last=2)
    assert path == f"{root}/step_0000000004" and kept(root) == [4, 30]
    dmuon.save_checkpoint(root, 31, run.model, run.optimizer)
    dmuon.save_checkpoint(root, 5, run.model, run.optimizer, keep_last=3)
    assert kept(root) == [4, 5, 31]
    dmuon.save_checkpoint(root, 30, run.model, run.optimizer)
    dmuon.save_checkpoint(root, 32, run.model, run.optimizer, keep_last=2)
    assert kept(root) == [30, 32]
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 32
    found = dmuon.load_checkpoint(root, run.model, run.optimizer, step=30)
    assert (found.step, found.path) == (30, f"{root}/step_0000000030")


def kept(root):
    """On every rank, as soon as the call has returned there."""
    names = set(os.listdir(root)) - {".lock"}
    assert all(name.startswith("step_") for name in names)
    return sorted(int(name.removeprefix("step_")) for name in names)


def test_what_goes_with_it_comes_back_as_it_was(tmp_path):
    run_ranks(check_extra, 1, str(tmp_path))


def check_extra(rank, world_size, root):
    run = start("alone")
    scheduler = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2, 4])
    extra = {
        "scheduler": scheduler.state_dict(),
        "nested": {1: (2, [3.5, (None, True)]), "<dict>": "<tuple>", (4, 5): {}},
        "rng": torch.get_rng_state(),
        "tensors": (torch.tensor(1 + 2j).conj(), torch.ones(2, 0), torch.arange(6.0).view(2, 3).T),
        "halves": [torch.tensor([1.5, -0.0], dtype=torch.bfloat16), torch.tensor(True)],
        "numbers": [1e-300, float("inf"), 2**70, -0.0, 0.1 + 0.2],
    }
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer, extra=extra)
    found = dmuon.load_checkpoint(root, run.model, run.optimizer)
    assert repr(found.extra["nested"]) == repr(extra["nested"])
    assert repr(found.extra["numbers"]) == repr(extra["numbers"])
    assert found.extra["scheduler"]["milestones"] == scheduler.state_dict()["milestones"]
    assert torch.equal(found.extra["rng"], extra["rng"])
    for got, want in zip(
        (*found.extra["tensors"], *found.extra["halves"]), (*extra["tensors"], *extra["halves"])
    ):
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)
    assert found.extra["halves"][0].signbit()[1]
    dmuon.save_checkpoint(root, 2, run.model)
    found = dmuon.load_checkpoint(root, run.model)
    assert found.extra == {} and found.rank_extra is None


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path):
    run_ranks(check_tensor_lr, 1, str(tmp_path))


def check_tensor_lr(rank, world_size, root):
    run = start("alone", muon={"lr": torch.tensor(0.25), "adamw_betas": (0.8, 0.9)})
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    rates[0].fill_(0.125)
    dmuon.load_checkpoint(root, run.model, run.optimizer)
    muon, adamw = run.optimizer.param_groups
    assert muon["lr"] is rates[0] and muon["lr"].item() == 0.25
    assert adamw["betas"] == (0.8, 0.9)


# What is refused -------------------------------------------------------------------------------


def test_wrong_arguments_are_the_same_error_on_all_ranks_and_write_nothing(tmp_path):
    run_ranks(check_arguments, 2, str(tmp_path))


def check_arguments(rank, world_size, root):
    run = start("fsdp2")
    model, optimizer = run.model, run.optimizer

    def save(*words, directory=root, step=1, **options):
        call = lambda: dmuon.save_checkpoint(directory, step, model, optimizer, **options)  # noqa: E731
        assert_all_raise(call, "ValueError", *words)

    for step in (-1, 1.0, "1", None, True, 10**10):
        save(f"step is {step!r}", step=step)
    for keep_last in (0, -1, 1.5, "2", True):
        save(f"keep_last is {keep_last!r}", keep_last=keep_last)
    many = {f"x{i}": torch.zeros(2**18) for i in range(5)}
    for name in ("extra", "rank_extra"):
        save(name, "Object of type object", **{name: {"x": object()}})
        save(name, "5.0 MiB of tensors, and 4 are the most", "buffers", **{name: many})
        save(name, "no plain tensor", **{name: {"x": next(iter(model.parameters()))}})
    save("rank_extra", "not iterable", rank_extra=rank or None)  # on one rank only
    save("directory is None", directory=None if rank else root)
    save("directory is 5", directory=5 if rank else root)
    save("step is -1", step=-1 if rank else 1)  # on one rank only
    save("'step'; rank 0: 0; rank 1: 1", step=rank)
    save("keep_last", keep_last=rank + 1)
    save("directory", directory=f"{root}/{rank}")
    mine, other = optimizer, torch.optim.AdamW(model.parameters())
    optimizer = mine if rank else None
    save("'optimizer'; rank 0: 'None'; rank 1: 'given'")
    optimizer = other if rank else mine
    save("optimizer is a AdamW")
    optimizer = mine
    assert os.listdir(root) == []
    path = dmuon.save_checkpoint(root, np.int64(1), model, optimizer, keep_last=np.int32(1))
    save(f"{root}/step_0000000001 is there already", "Remove it, save another step")
    save(f"{path} is a checkpoint itself", "the directory above", directory=path)
    check_load_arguments(rank, root, run, path, other)


def check_load_arguments(rank, root, run, path, other):
    def load(*words, directory=root, optimizer=run.optimizer, **options):
        call = lambda: dmuon.load_checkpoint(directory, run.model, optimizer, **options)  # noqa: E731
        assert_all_raise(call, "ValueError", *words)

    dmuon.save_checkpoint(root, 3, run.model, run.optimizer)
    load("has no checkpoint of step 2; it has 3, 1.", step=2)
    load(f"{root}/none has no checkpoint", directory=f"{root}/none")
    for step in (-1, "x", True, 1.0):
        load(f"step is {step!r}", step=step)
        load(f"step is {step!r}", step=step if rank else 1)
    load("load the same checkpoint", "'step'; rank 0: 1; rank 1: 3", step=1 + 2 * rank)
    load("'directory'", directory=f"{root}/{rank}")
    load("directory is None", directory=None if rank else root)
    load("'optimizer'; rank 0: 'None'", optimizer=run.optimizer if rank else None)
    load("optimizer is a AdamW", optimizer=other if rank else run.optimizer)
    load("is a checkpoint itself", directory=path, step=1)
    assert dmuon.load_checkpoint(root, run.model, run.optimizer, step=np.int64(1)).step == 1
    found = dmuon.load_checkpoint(path, run.model, run.optimizer)
    assert (found.step, found.path) == (1, path)


# Failures --------------------------------------------------------------------------------------


def test_a_failure_on_any_rank_is_everybodys_and_training_goes_on(tmp_path):
    run_ranks(check_failures, 2, str(tmp_path), limit_s=90.0)


def check_failures(rank, world_size, root):
    undisturbed, run = start("fsdp2"), start("fsdp2")
    for each in (undisturbed, run):
        train(each, 0, 2)
    dmuon.save_checkpoint(root, 2, run.model, run.optimizer)
    before = snapshot(root)
    for failure, (word, ranks) in FAILURES.items():
        for victim in ranks:
            with failure() if rank == victim else contextlib.nullcontext():
                save = lambda: dmuon.save_checkpoint(root, 3, run.model, run.optimizer)  # noqa: E731
                text = assert_all_raise(save, "RuntimeError", word, "Nothing that was there")
            assert f"rank {victim}" in text, text
            assert snapshot(root) == before, failure
    for each in (undisturbed, run):
        train(each, 2, 4)
    assert_same(whole(run), whole(undisturbed))
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 2


def snapshot(root):
    return {p: p.read_bytes() for p in Path(root).rglob("*") if p.is_file()}


def full_disk():
    """The kernel's own: every write to it fails."""

    def full(*args):
        return builtins.open("/dev/full", "wb")

    return mock.patch.object(safe_storage, "open", full, create=True)


@contextlib.contextmanager
def quota():
    """Of the kernel: no file may be longer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def refusing(module, name, number):
    """Root may do everything, so the answer of the system is made up."""
    error = OSError(number, os.strerror(number))
    return lambda: mock.patch.object(module, name, create=True, side_effect=error)


def interrupted():
    return mock.patch.object(safe_storage, "_write", side_effect=KeyboardInterrupt())


FAILURES = {  # what happens -> (a word of the error, on which ranks)
    full_disk: ("No space left on device", (0, 1)),
    quota: ("File too large", (0, 1)),
    interrupted: ("KeyboardInterrupt", (1,)),
    refusing(safe_storage, "open", errno.EACCES): ("Permission denied", (0, 1)),
    refusing(safe_storage, "open", errno.EROFS): ("Read-only file system", (1,)),
    refusing(os, "fsync", errno.EIO): ("Input/output error", (0, 1)),
    refusing(manifest, "open", errno.ENOSPC): ("No space left on device", (0,)),
    refusing(os, "rename", errno.EACCES): ("Permission denied", (0,)),
    refusing(Path, "mkdir", errno.EROFS): ("Read-only file system", (0,)),
}


def test_what_cannot_be_a_directory_is_named(tmp_path):
    run_ranks(check_no_directory, 2, str(tmp_path))


def check_no_directory(rank, world_size, root):
    file = Path(root, "file")
    file.touch()
    run = start("fsdp2")
    for directory in (file, file / "below"):
        save = lambda: dmuon.save_checkpoint(directory, 1, run.model)  # noqa: B023, E731
        assert_all_raise(save, "RuntimeError", str(file), "saving")
    assert file.read_bytes() == b""

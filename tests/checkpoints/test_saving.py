"""save_checkpoint: what it keeps and removes, what it refuses, and what a failure leaves."""

import builtins
import contextlib
import errno
import os
import resource
import shutil
from pathlib import Path
from unittest import mock

import dmuon
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
    assert path == f"{root}/step_0000000004" and kept(root) == [4, 10, 30]
    dmuon.save_checkpoint(root, 31, run.model, run.optimizer, keep_last=2)
    assert kept(root) == [30, 31]
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 31
    found = dmuon.load_checkpoint(root, run.model, run.optimizer, step=30)
    assert (found.step, found.path) == (30, f"{root}/step_0000000030")


def kept(root):
    torch.distributed.barrier()  # the first rank removes after the others have returned
    assert all(name.startswith("step_") for name in os.listdir(root))
    return sorted(int(name.removeprefix("step_")) for name in os.listdir(root))


def test_leftovers_of_crashed_saves_are_removed_and_foreign_files_are_not(tmp_path):
    run_ranks(check_leftovers, 2, str(tmp_path))


def check_leftovers(rank, world_size, root):
    foreign = {"notes.txt", "step_1", "best", ".hidden.part"}
    if rank == 0:
        for name in (".step_0000000001.part", ".step_0000000007.old", *foreign):
            Path(root, name).mkdir()
            Path(root, name, "rank0.data").write_bytes(b"torn")
    run = start("fsdp2")
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer, keep_last=1)
    assert set(os.listdir(root)) == foreign | {"step_0000000001"}
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 1


def test_what_goes_with_it_comes_back_as_it_was(tmp_path):
    run_ranks(check_extra, 1, str(tmp_path))


def check_extra(rank, world_size, root):
    run = start("alone")
    scheduler = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2, 4])
    extra = {
        "scheduler": scheduler.state_dict(),
        "nested": {1: (2, [3.5, (None, True)]), "<dict>": "<tuple>", (4, 5): {}},
        "numbers": [1e-300, float("inf"), 2**70, -0.0, 0.1 + 0.2],
    }
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer, extra=extra)
    found = dmuon.load_checkpoint(root, run.model, run.optimizer)
    assert repr(found.extra["nested"]) == repr(extra["nested"])
    assert repr(found.extra["numbers"]) == repr(extra["numbers"])
    assert found.extra["scheduler"]["milestones"] == scheduler.state_dict()["milestones"]
    dmuon.save_checkpoint(root, 2, run.model)
    assert dmuon.load_checkpoint(root, run.model).extra == {}


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
    save("extra is not plain data", "Tensor", extra={"x": torch.zeros(2)})
    save("step is -1", step=-1 if rank else 1)  # on one rank only
    save("'step'; rank 0: 0; rank 1: 1", step=rank)
    save("keep_last", keep_last=rank + 1)
    save("directory", directory=f"{root}/{rank}")
    assert os.listdir(root) == []
    dmuon.save_checkpoint(root, 1, model, optimizer)
    save(f"{root}/step_0000000001 is there already")
    assert_all_raise(
        lambda: dmuon.load_checkpoint(root, model, optimizer, step=2), "ValueError", "it has 1."
    )
    missing = f"{root}/none"
    assert_all_raise(
        lambda: dmuon.load_checkpoint(missing, model), "ValueError", f"{missing} has no checkpoint"
    )


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
            torch.distributed.barrier()
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


FAILURES = {  # what happens -> (a word of the error, on which ranks)
    full_disk: ("No space left on device", (0, 1)),
    quota: ("File too large", (0, 1)),
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


def test_what_cannot_be_removed_stays_and_goes_with_the_next_save(tmp_path):
    run_ranks(check_not_removed, 1, str(tmp_path))


def check_not_removed(rank, world_size, root):
    run = start("alone")
    dmuon.save_checkpoint(root, 1, run.model)
    with refusing(shutil, "rmtree", errno.EBUSY)():
        dmuon.save_checkpoint(root, 2, run.model, keep_last=1)
    assert sorted(os.listdir(root)) == [".step_0000000001.old", "step_0000000002"]
    dmuon.save_checkpoint(root, 3, run.model, keep_last=1)
    assert os.listdir(root) == ["step_0000000003"]

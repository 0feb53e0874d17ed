"""A directory of checkpoints: one job at a time, which is the newest, and what is left behind."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import dmuon
import torch
from dmuon import checkpoint_directory

from tests.checkpoints.kinds import assert_same, start, whole
from tests.checkpoints.test_saving import kept, refusing
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks

# One job at a time -----------------------------------------------------------------------------

HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_directory_that_another_job_saves_to_is_refused_until_that_job_is_dead(tmp_path):
    run_ranks(check_two_jobs, 2, str(tmp_path))


def check_two_jobs(rank, world_size, root):
    run = start("fsdp2")
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer)
    theirs = Path(root, ".step_0000000002.0123abcd.part")
    if rank == 0:
        theirs.mkdir()
        command = [sys.executable, "-c", HOLDER, f"{root}/.lock"]
        other = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert other.stdout.readline() == b"held\n"
    save = lambda: dmuon.save_checkpoint(root, 2, run.model, run.optimizer, keep_last=1)  # noqa: E731
    assert_all_raise(save, "RuntimeError", "another job is saving there", f"{root}/.lock")
    assert set(os.listdir(root)) == {".lock", theirs.name, "step_0000000001"}
    torch.distributed.barrier()
    if rank == 0:
        other.kill()
        other.wait()
        other.stdout.close()
    save()
    assert kept(root) == [2]


def test_where_files_cannot_be_locked_it_warns_once_and_leaves_what_may_be_another_jobs(tmp_path):
    run_ranks(check_no_locks, 2, str(tmp_path))


def check_no_locks(rank, world_size, root):
    run, left = start("fsdp2"), Path(root, ".step_0000000001.0123abcd.part")
    if rank == 0:
        left.mkdir()
    with refusing(fcntl, "flock", errno.ENOLCK)(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dmuon.save_checkpoint(root, 1, run.model, run.optimizer)
        dmuon.save_checkpoint(root, 2, run.model, run.optimizer, keep_last=1)
    told = [str(each.message) for each in told if ".lock" in str(each.message)]
    assert len(told) == (rank == 0) and all("No locks available" in text for text in told), told
    assert set(os.listdir(root)) == {".lock", left.name, "step_0000000002"}


# Which is the newest ---------------------------------------------------------------------------


def test_after_going_back_the_newest_is_what_was_saved_last(tmp_path):
    run_ranks(check_rolled_back, 2, str(tmp_path))


def check_rolled_back(rank, world_size, root):
    run = start("fsdp2")
    load = lambda **step: dmuon.load_checkpoint(root, run.model, run.optimizer, **step)  # noqa: E731
    for step in (50, 90, 100):
        dmuon.save_checkpoint(root, step, run.model, run.optimizer)
    load(step=50)
    run.train(1)
    want = whole(run)
    dmuon.save_checkpoint(root, 60, run.model, run.optimizer)
    run.train(2)
    assert load().step == 60
    assert_same(whole(run), want)
    save = lambda: dmuon.save_checkpoint(root, 90, run.model, run.optimizer)  # noqa: E731
    assert_all_raise(save, "ValueError", "went back to an older step", "Remove it")
    dmuon.save_checkpoint(root, 70, run.model, run.optimizer)
    torch.distributed.barrier()
    if rank == 0:
        os.truncate(f"{root}/step_0000000070/rank0.data", 1)
    torch.distributed.barrier()
    assert_all_raise(load, "ValueError", "70/rank0.data is damaged", "step=60")
    dmuon.save_checkpoint(root, 80, run.model, run.optimizer, keep_last=3)
    assert kept(root) == [60, 70, 80]


def test_those_saved_before_there_was_an_order_go_by_their_step(tmp_path):
    run_ranks(check_without_order, 1, str(tmp_path))


def check_without_order(rank, world_size, root):
    """Their marker was the checksum of the manifest alone."""
    run = start("alone")
    for step in (7, 30, 4):
        path = dmuon.save_checkpoint(root, step, run.model, run.optimizer)
        digest = hashlib.sha256(Path(path, "manifest.json").read_bytes()).hexdigest()
        Path(path, "COMMIT").write_text(digest)
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 30
    dmuon.save_checkpoint(root, 5, run.model, run.optimizer, keep_last=3)
    assert kept(root) == [5, 7, 30]
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 5


def test_one_whose_marker_is_lost_may_be_the_newest_and_is_not_removed(tmp_path):
    run_ranks(check_lost_marker, 1, str(tmp_path))


def check_lost_marker(rank, world_size, root):
    run = start("alone")
    for step in (1, 2):
        dmuon.save_checkpoint(root, step, run.model, run.optimizer)
    os.remove(f"{root}/step_0000000001/COMMIT")
    load = lambda: dmuon.load_checkpoint(root, run.model, run.optimizer)  # noqa: E731
    assert_all_raise(load, "ValueError", "step_0000000001/COMMIT", "step=2")
    for step in (3, 4):
        dmuon.save_checkpoint(root, step, run.model, run.optimizer, keep_last=1)
    assert kept(root) == [1, 4]


# What is left behind ---------------------------------------------------------------------------


def test_leftovers_of_crashed_saves_are_removed_and_foreign_files_are_not(tmp_path):
    run_ranks(check_leftovers, 2, str(tmp_path))


def check_leftovers(rank, world_size, root):
    foreign = {"notes.txt", "manifest.json", "step_1", "best", ".hidden.part"}
    ours = {".step_0000000001.part", ".step_0000000007.old", ".step_0000000001.00ff00ff.part"}
    if rank == 0:
        for name in foreign | ours:
            Path(root, name).mkdir()
            Path(root, name, "rank0.data").write_bytes(b"torn")
        Path(root, ".step_0000000002.part").touch()
        Path(root, ".step_0000000003.old").symlink_to(f"{root}/best")
    run = start("fsdp2")
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer, keep_last=1)
    assert set(os.listdir(root)) == foreign | {"step_0000000001", ".lock"}
    assert os.listdir(f"{root}/best") == ["rank0.data"]
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 1


def test_of_a_checkpoint_that_is_a_link_the_link_goes(tmp_path):
    run_ranks(check_link, 1, str(tmp_path / "run"), str(tmp_path / "archive"))


def check_link(rank, world_size, root, archive):
    run = start("alone")
    path = dmuon.save_checkpoint(root, 1, run.model)
    shutil.move(path, archive)
    Path(path).symlink_to(archive)
    for step in (2, 3):
        dmuon.save_checkpoint(root, step, run.model, keep_last=1)
        assert kept(root) == [step]
    assert dmuon.load_checkpoint(archive, run.model).step == 1


def test_what_cannot_be_removed_stays_and_goes_with_the_next_save(tmp_path):
    run_ranks(check_not_removed, 1, str(tmp_path))


def check_not_removed(rank, world_size, root):
    run = start("alone")
    dmuon.save_checkpoint(root, 1, run.model)
    with refusing(shutil, "rmtree", errno.EBUSY)():
        dmuon.save_checkpoint(root, 2, run.model, keep_last=1)
    lock, left, there = sorted(os.listdir(root))
    assert (lock, there) == (".lock", "step_0000000002")
    assert left.startswith(".step_0000000001.") and left.endswith(".old")
    dmuon.save_checkpoint(root, 3, run.model, keep_last=1)
    assert kept(root) == [3]


def test_what_another_user_has_left_stays_and_the_save_goes_on(tmp_path):
    run_ranks(check_another_users, 1, str(tmp_path))


def check_another_users(rank, world_size, root):
    """Root may remove everything: the system's answer is made up, for what is in it."""
    run, left = start("alone"), Path(root, ".step_0000000001.part")
    left.mkdir()
    Path(left, "rank0.data").touch()
    with refusing(os, "unlink", errno.EPERM)():
        dmuon.save_checkpoint(root, 2, run.model, keep_last=1)
    assert os.listdir(left) == ["rank0.data"]
    assert checkpoint_directory.newest_step(root) == 2

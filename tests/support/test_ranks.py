import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, run_fresh, run_ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_runs_the_function_in_one_group(world_size):
    results = run_ranks(sum_of_ranks, world_size, 10)
    assert results == [(rank, sum(range(world_size)) + 10.0) for rank in range(world_size)]


def sum_of_ranks(rank, world_size, offset):
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return rank, x.item() + offset


def test_the_processes_are_kept_between_calls():
    assert run_ranks(pid, 2) == run_ranks(pid, 2)


def pid(rank, world_size):
    return os.getpid()


def test_a_failure_names_its_rank_and_the_next_call_works():
    with pytest.raises(RankFailure, match=r"(?s)rank 1.*fail_on_one.*only rank 1 raises") as info:
        run_ranks(fail_on_one, 2)
    assert info.value.rank == 1
    assert len(run_ranks(pid, 2)) == 2


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("only rank 1 raises")
    dist.barrier()


def test_a_rank_that_hangs_shows_its_stack():
    with pytest.raises(RankFailure, match=r"(?s)rank 0 did not answer.*in hang_on_one"):
        run_ranks(hang_on_one, 2, limit_s=1.0)
    assert len(run_ranks(pid, 2)) == 2


def hang_on_one(rank, world_size):
    if rank == 0:
        time.sleep(600)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        run_ranks(die_on_one, 2)


def die_on_one(rank, world_size):
    if rank == 1:
        os._exit(7)


def test_groups_of_a_call_do_not_outlive_it():
    run_ranks(leave_a_group, 2)
    assert run_ranks(count_groups, 2) == [1, 1]


def leave_a_group(rank, world_size):
    dist.new_group([0, 1])


def count_groups(rank, world_size):
    return len(dist.distributed_c10d._world.pg_map)


def test_a_fresh_script_gets_its_own_interpreters():
    script = """
import os, sys
assert "torch" not in sys.modules
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
"""
    assert run_fresh(script, 2) == ["0 of 2\n", "1 of 2\n"]

"""k micro-batches are one large batch, with or without no_sync; clipping sees all gradients."""

import dmuon
import pytest
import torch
import torch.nn as nn

from tests.support.parity import (
    assert_all_raise,
    assert_same,
    check_parity,
    full_weights,
    setup,
    three_steps,
)
from tests.support.ranks import run_ranks

PARTS = 4


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_micro_batches_with_and_without_no_sync(world_size):
    run_ranks(check_micro_batches, world_size)


def check_micro_batches(rank, world_size):
    check_parity(rank, world_size, accumulate(no_sync=True))
    check_parity(rank, world_size, accumulate(no_sync=False))


def accumulate(no_sync):
    """The oracle sees the large batch cut the same way, so the sums are the same ones."""

    def script(run):
        for step in range(2):
            for part in range(PARTS):
                quiet = no_sync and part < PARTS - 1
                for rank in run.ranks:
                    if quiet:
                        with run.no_sync():
                            (run.loss(step, rank, part, PARTS) / PARTS).backward()
                    else:
                        (run.loss(step, rank, part, PARTS) / PARTS).backward()
            run.step()

    return script


@pytest.mark.parametrize("world_size", [2])
def test_micro_batches_equal_one_large_batch(world_size):
    run_ranks(check_large_batch, world_size)


def check_large_batch(rank, world_size):
    """Against the oracle on the whole batch at once; the mean of equal parts is the mean."""
    check_parity(rank, world_size, large_or_cut)


def large_or_cut(run):
    for step in range(2):
        for rank in run.ranks:
            if run.managed:
                for part in range(PARTS - 1):
                    with run.no_sync():
                        (run.loss(step, rank, part, PARTS) / PARTS).backward()
                (run.loss(step, rank, PARTS - 1, PARTS) / PARTS).backward()
            else:
                run.loss(step, rank).backward()
        run.step()
    run.losses.clear()  # those of the parts are not those of the whole


@pytest.mark.parametrize("world_size", [2])
def test_no_sync_nests_and_ends_with_an_exception(world_size):
    run_ranks(check_nested, world_size)


def check_nested(rank, world_size):
    check_parity(rank, world_size, nested)
    check_parity(rank, world_size, exception_inside)


def nested(run):
    for step in range(2):
        for rank in run.ranks:
            with run.no_sync():
                with run.no_sync():
                    run.loss(10 + step, rank).backward()
                run.loss(20 + step, rank).backward()
            run.loss(step, rank).backward()
        run.step()


def exception_inside(run):
    for step in range(2):
        for rank in run.ranks:
            with pytest.raises(ZeroDivisionError), run.no_sync():
                run.loss(10 + step, rank).backward()
                raise ZeroDivisionError
            run.loss(step, rank).backward()
        run.step()


@pytest.mark.parametrize("world_size", [2])
def test_a_step_after_no_sync_alone_is_refused(world_size):
    run_ranks(check_forgotten_sync, world_size)


def check_forgotten_sync(rank, world_size):
    """F35: gradients that were never reduced must not be used as if they were."""
    run = setup(world_size)
    three_steps(run)
    before = full_weights(run.model)
    with run.no_sync():
        run.loss(5, rank).backward()
    assert_all_raise(run.optimizer.step, "ValueError", "no_sync")
    assert_same(full_weights(run.model), before)
    run.optimizer.zero_grad()
    run.train(6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_forwards_first_then_backwards_under_no_sync(world_size):
    run_ranks(check_late_backwards, world_size)


def check_late_backwards(rank, world_size):
    check_parity(rank, world_size, late_backwards)


def late_backwards(run):
    for step in range(2):
        for rank in run.ranks:
            with run.no_sync():
                losses = [run.loss(10 * step + i, rank) for i in range(2)]
                for loss in losses:
                    loss.backward()
            run.loss(10 * step + 2, rank).backward()
        run.step()


# Clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_clipping_by_the_global_norm(world_size):
    run_ranks(check_clipping, world_size)


def check_clipping(rank, world_size):
    for norm_type in (2.0, float("inf"), 1.0):
        check_parity(rank, world_size, clip_each_step(norm_type))


def clip_each_step(norm_type):
    """Clips hard and not at all; the norm is compared like a loss."""

    def script(run):
        for step, max_norm in enumerate([0.05, 1e9, 0.05]):
            for rank in run.ranks:
                run.loss(step, rank).backward()
            norm = run.clip(max_norm, norm_type)
            assert norm.ndim == 0
            run.losses.append(float(norm))
            run.step()

    return script


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_norm_is_one_number_on_all_ranks_and_clipping_to_zero_stops_training(world_size):
    run_ranks(check_clip_to_zero, world_size)


def check_clip_to_zero(rank, world_size):
    run = setup(world_size, muon={"weight_decay": 0.0, "adamw_weight_decay": 0.0})
    start = full_weights(run.model)
    run.loss(0, rank).backward()
    norm = dmuon.clip_grad_norm_(run.optimizer, 0.0)
    norms = [None] * world_size
    torch.distributed.all_gather_object(norms, norm.item())
    assert len(set(norms)) == 1 and norms[0] > 0, norms
    run.optimizer.step()
    assert_same(full_weights(run.model), start)


@pytest.mark.parametrize("world_size", [2])
def test_torch_clipping_gives_the_global_norm_or_raises(world_size):
    run_ranks(check_torch_clipping, world_size)


def check_torch_clipping(rank, world_size):
    run = setup(world_size)
    run.loss(0, rank).backward()
    want = dmuon.clip_grad_norm_(run.optimizer, 1e9)
    try:
        got = nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
    except RuntimeError:
        return
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("world_size", [2])
def test_a_nonfinite_norm_raises_on_request(world_size):
    run_ranks(check_nonfinite_norm, world_size)


def check_nonfinite_norm(rank, world_size):
    run = setup(world_size)
    (run.loss(0, rank) * (float("inf") if rank == 1 else 1.0)).backward()
    assert_all_raise(
        lambda: dmuon.clip_grad_norm_(run.optimizer, 1.0, error_if_nonfinite=True), "RuntimeError"
    )

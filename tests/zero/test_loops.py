"""The loops that DeepSpeed's users write: who decides where a step ends, and what happens in between."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.support.models import Net
from tests.support.ranks import run_ranks
from tests.support.zero import (
    STAGES,
    batch,
    check_zero,
    ds_config,
    dtype_of,
    loss_of,
    make_engine,
    train,
    weights,
)

PARTS = 3
by_stage = pytest.mark.parametrize("stage", STAGES)
# Micro-batches that the loop counts itself, and DeepSpeed does not divide by: their sum.
SUMMED = {"gas": PARTS, "factor": PARTS}


def each_part(engine, step, forward, parts=PARTS):
    """The losses of a step, each computed when it is asked for."""
    for part in range(parts):
        yield loss_of(engine, step, part, parts, forward)


@pytest.mark.parametrize("stage", [0, 1])  # DeepSpeed refuses it where gradients are in parts
def test_no_sync(stage):
    run_ranks(check_zero_with, 2, stage, "no_sync", limit_s=90)


@pytest.mark.parametrize("stage", [1, 2, 3])  # as DeepSpeed has it
def test_coalesced_reductions(stage):
    run_ranks(check_zero_with, 2, stage, "coalesced", limit_s=90)


@by_stage
def test_boundaries_that_the_loop_sets(stage):
    run_ranks(check_zero_with, 2, stage, "set_boundaries", limit_s=90)


@by_stage
def test_accumulation_that_the_loop_manages(stage):
    config = {"managed_gradient_accumulation": False}
    run_ranks(check_zero_with, 2, stage, "unmanaged", config, limit_s=90)


def check_zero_with(rank, world_size, stage, loop, config=None):
    run = functools.partial(in_steps, LOOPS[loop])
    for clip in (0.0, 0.1):
        check_zero(rank, world_size, stage, run=run, oracle=SUMMED, clip=clip, **(config or {}))


def in_steps(loop, engine, steps, forward):
    for step in range(steps):
        loop(engine, each_part(engine, step, forward))
        engine.step()


def no_sync(engine, losses):
    with engine.no_sync():
        for _ in range(PARTS - 1):
            engine.backward(next(losses))
    engine.backward(next(losses))


def coalesced(engine, losses):
    with engine.coalesce_grad_reduction():
        for loss in losses:
            engine.backward(loss)


def set_boundaries(engine, losses):
    for part in range(PARTS):
        engine.set_gradient_accumulation_boundary(part == PARTS - 1)
        engine.backward(next(losses))


def unmanaged(engine, losses):
    for loss in losses:
        engine.backward(loss)


LOOPS = {
    "no_sync": no_sync,
    "coalesced": coalesced,
    "set_boundaries": set_boundaries,
    "unmanaged": unmanaged,
}


@pytest.mark.parametrize("stage", [1, 2, 3])  # DeepSpeed refuses it at stage 0
def test_backward_of_the_loss_itself(stage):
    run_ranks(check_backward_of_the_loss, 2, stage, limit_s=90)


def check_backward_of_the_loss(rank, world_size, stage):
    for config in ({"gas": 2, "clip": 0.1}, {"bf16": {"enabled": True}}):
        check_zero(rank, world_size, stage, run=train_by_loss_backward, **config)


def train_by_loss_backward(engine, steps, forward):
    parts = engine.gradient_accumulation_steps()
    for step in range(steps):
        for loss in each_part(engine, step, forward, parts):
            loss.backward()
            engine.step()


@by_stage
def test_losses_that_are_not_divided(stage):
    run_ranks(check_losses_that_are_not_divided, 2, stage, limit_s=90)


def check_losses_that_are_not_divided(rank, world_size, stage):
    oracle = {"factor": 2}
    check_zero(rank, world_size, stage, run=train_undivided, gas=2, clip=0.1, oracle=oracle)


def train_undivided(engine, steps, forward):
    for step in range(steps):
        for loss in each_part(engine, step, forward, 2):
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()


@by_stage
def test_evaluation_at_any_moment(stage):
    run_ranks(check_evaluation_at_any_moment, 2, stage, limit_s=90)


def check_evaluation_at_any_moment(rank, world_size, stage):
    """It changes nothing, and sees the weights of the last step."""
    check_zero(rank, world_size, stage, run=train_with_evaluations, gas=2, clip=0.1)


def train_with_evaluations(engine, steps, forward):
    for step in range(steps):
        for loss in each_part(engine, step, forward, 2):
            before = evaluated(engine)
            engine.backward(loss)
            assert torch.equal(evaluated(engine), before)
            engine.step()
            evaluated(engine)
            if engine.zero_optimization_stage() < 3 and dist.get_rank() == 0:
                evaluated(engine)  # no other rank takes part


def evaluated(engine):
    engine.eval()
    with torch.no_grad():
        out = engine(batch(0, 0, 1)[0].to(dtype_of(engine)))
    engine.train()
    return out


@by_stage
def test_what_is_evaluated_are_the_updated_weights(stage):
    run_ranks(check_what_is_evaluated, 2, stage, limit_s=90)


def check_what_is_evaluated(rank, world_size, stage):
    engine = make_engine(ds_config(stage))
    train(engine, 2)
    got, whole = evaluated(engine), weights(engine)
    plain = Net()
    plain.load_state_dict(whole)
    torch.testing.assert_close(got, plain(batch(0, 0, 1)[0]), rtol=1e-6, atol=1e-6)
    before = weights(engine)
    loss_of(engine, 2)  # a forward without a backward
    train(engine, 1, first=2)
    assert all(not torch.equal(before[n], w) for n, w in weights(engine).items())

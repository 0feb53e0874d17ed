"""float16 with a loss scale: the same numbers, whatever the scale is and when it changes."""

import math

import pytest

from tests.support.ranks import run_ranks
from tests.support.weights import assert_same
from tests.support.zero import check_zero, train, weights
from tests.zero.test_overflow import DEDICATED, MANAGED, poisoned_step

STAGES = (1, 2, 3)  # stage 0 is refused: DeepSpeed does not scale the loss there
by_stage = pytest.mark.parametrize("stage", STAGES)


def fp16_supported():
    from torch import ops

    return ops.mkldnn._is_mkldnn_fp16_supported()  # what DeepSpeed asks on a CPU


pytestmark = pytest.mark.skipif(
    not fp16_supported(), reason="DeepSpeed: Type fp16 is not supported on this machine's CPU"
)


def fp16(**settings):
    return {"fp16": {"enabled": True, **settings}}


@by_stage
def test_a_fixed_scale(stage):
    run_ranks(check_a_fixed_scale, 2, stage, limit_s=90)


def check_a_fixed_scale(rank, world_size, stage):
    for gas, clip in ((1, 0.0), (2, 0.1)):
        engine = check_zero(rank, world_size, stage, gas=gas, clip=clip, **fp16(loss_scale=128))
        assert scale_of(engine) == 128


@by_stage
def test_a_scale_that_falls_until_nothing_overflows(stage):
    run_ranks(check_a_falling_scale, 2, stage, limit_s=90)


def check_a_falling_scale(rank, world_size, stage):
    config = fp16(initial_scale_power=24, hysteresis=1)
    engine = check_zero(rank, world_size, stage, run=train_until_applied, clip=0.1, **config)
    assert engine.skipped_steps > 0 and scale_of(engine) == 2.0 ** (24 - engine.skipped_steps)


def train_until_applied(engine, steps, forward):
    for step in range(steps):
        train(engine, 1, first=step)
        while not engine.was_step_applied():
            train(engine, 1, first=step)


@by_stage
def test_a_scale_that_grows(stage):
    """Momentum holds gradients of before and after in one unit."""
    run_ranks(check_a_growing_scale, 2, stage, limit_s=90)


def check_a_growing_scale(rank, world_size, stage):
    config = fp16(initial_scale_power=6, loss_scale_window=2)
    for clip in (0.0, 0.1):
        oracle = {} if clip else {"managed_at": of_a_step_with_growth}
        engine = check_zero(rank, world_size, stage, clip=clip, steps=6, oracle=oracle, **config)
        assert scale_of(engine) == 2.0 ** (6 + 2)


def of_a_step_with_growth(step):
    """DeepSpeed divides its own gradients by the scale of the next step already, which clipping hides."""
    return 0.5 if step in (2, 4) else 1.0


@by_stage
@pytest.mark.parametrize("name", [DEDICATED, MANAGED])
def test_an_overflow_leaves_no_trace(stage, name):
    run_ranks(check_an_overflow, 2, stage, name, limit_s=90)


def check_an_overflow(rank, world_size, stage, name):
    def train_with_overflow(engine, steps, forward):
        train(engine, 1)
        before = weights(engine)
        poisoned_step(engine, name, math.inf)
        assert not engine.was_step_applied() and engine.skipped_steps == 1
        assert scale_of(engine) == 2.0**5
        assert_same(weights(engine), before)
        train(engine, steps - 1, first=1)

    config = fp16(initial_scale_power=6, hysteresis=1)
    check_zero(rank, world_size, stage, run=train_with_overflow, clip=0.1, **config)


def scale_of(engine):
    return engine.optimizer.loss_scale

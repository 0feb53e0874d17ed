"""A gradient that is not finite, on one rank: nothing changes anywhere, and training goes on."""

import contextlib
import functools
import math

import dmuon
import pytest
import torch
import torch.distributed as dist

from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks
from tests.support.weights import assert_same
from tests.support.zero import STAGES, check_zero, ds_config, loss_of, make_engine, train, weights

PRECISIONS = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "BF16_Optimizer": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    # In float32 nobody looks then.
    "no norm": {"bf16": {"enabled": True}, "clip": 0.0, "zero": {"compute_grad_norm": False}},
}
ONLY_AT = {"BF16_Optimizer": (1,), "no norm": (1, 2)}
# Where DeepSpeed has no rule of its own, ours is asked for.
SKIPPING = {"params": {"nonfinite": "skip"}}
DEDICATED, MANAGED = "blocks.0.up.weight", "head.bias"
WARMUP = {
    "type": "WarmupLR",
    "params": {
        "warmup_max_lr": 0.02,
        "warmup_min_lr": 0.002,
        "warmup_num_steps": 5,
        "warmup_type": "linear",
    },
}


def cases():
    for stage in STAGES:
        for precision in PRECISIONS:
            if stage in ONLY_AT.get(precision, STAGES):
                yield stage, precision


@pytest.mark.parametrize("stage,precision", list(cases()))
def test_a_skipped_step_leaves_no_trace(stage, precision):
    run_ranks(check_a_skipped_step_leaves_no_trace, 2, stage, precision, limit_s=90)


def check_a_skipped_step_leaves_no_trace(rank, world_size, stage, precision):
    config = PRECISIONS[precision] | (SKIPPING if (stage, precision) == (0, "float32") else {})
    for name, value in ((DEDICATED, math.inf), (DEDICATED, math.nan), (MANAGED, math.inf)):
        run = functools.partial(train_with_a_poisoned_step, name=name, value=value)
        oracle = {"settings_at": lr_in_the_warmup}
        check_zero(
            rank,
            world_size,
            stage,
            run=run,
            scheduler=WARMUP,
            oracle=oracle,
            **{"clip": 0.1, **config},
        )


def lr_in_the_warmup(step):
    """Of steps that were taken: a skipped one does not count."""
    return {"lr": 0.1 + 0.9 * max(step - 1, 0) / 5}


def train_with_a_poisoned_step(engine, steps, forward, name, value):
    train(engine, 1)
    before, schedule = weights(engine), lr_of(engine)
    poisoned_step(engine, name, value)
    assert not engine.was_step_applied() and engine.skipped_steps == 1
    assert_same(weights(engine), before)
    assert lr_of(engine) == schedule
    train(engine, steps - 1, first=1)
    assert engine.was_step_applied()


def poisoned_step(engine, name, value):
    loss = loss_of(engine, 5)
    with poisoned(engine, name, value):
        engine.backward(loss)
    engine.step()


@contextlib.contextmanager
def poisoned(engine, name, value):
    """The gradient of `name` is `value` on the last rank."""
    parameter = dict(dmuon.zero.named_parameters(engine))[name]
    last = dist.get_rank() == dist.get_world_size() - 1
    hook = parameter.register_hook(lambda g: g * value if last else g)
    yield
    hook.remove()


def lr_of(engine):
    return [group["lr"] for group in engine.optimizer.param_groups]


def test_stage_0_in_float32_raises_where_nothing_else_is_said():
    run_ranks(check_stage_0_raises, 2)


def check_stage_0_raises(rank, world_size):
    engine = make_engine(ds_config(0))
    train(engine, 1)
    before = weights(engine)
    for name in (DEDICATED, MANAGED):
        step = functools.partial(poisoned_step, engine, name, math.inf)
        assert_all_raise(step, "RuntimeError", name)
        engine.zero_grad()
        assert_same(weights(engine), before)
    train(engine, 1, first=1)
    assert engine.was_step_applied()


def test_stage_0_in_float32_propagates_where_asked():
    run_ranks(check_stage_0_propagates, 2)


def check_stage_0_propagates(rank, world_size):
    engine = make_engine(ds_config(0, params={"nonfinite": "propagate"}))
    poisoned_step(engine, DEDICATED, math.nan)
    assert engine.was_step_applied() and engine.skipped_steps == 0
    broken = [name for name, w in weights(engine).items() if not torch.isfinite(w).all()]
    assert broken == [DEDICATED]

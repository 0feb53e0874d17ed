"""Under ZeRO every stage trains exactly as one process."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, check_zero

by_stage = pytest.mark.parametrize("stage", STAGES)
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@by_stage
def test_accumulation_and_clipping(stage):
    run_ranks(check_accumulation_and_clipping, 2, stage, limit_s=90)


def check_accumulation_and_clipping(rank, world_size, stage):
    for gas in (1, 2, 3):
        for clip in (0.0, 0.1):
            check_zero(rank, world_size, stage, gas=gas, clip=clip)


@by_stage
def test_an_odd_number_of_ranks(stage):
    run_ranks(check_an_odd_number_of_ranks, 3, stage, limit_s=90)


def check_an_odd_number_of_ranks(rank, world_size, stage):
    check_zero(rank, world_size, stage)
    check_zero(rank, world_size, stage, gas=2, clip=0.1)


@by_stage
def test_twenty_steps(stage):
    run_ranks(check_twenty_steps, 2, stage, limit_s=90)


def check_twenty_steps(rank, world_size, stage):
    check_zero(rank, world_size, stage, steps=20, clip=0.1)


@by_stage
def test_bfloat16(stage):
    run_ranks(check_bfloat16, 2, stage, limit_s=90)


@pytest.mark.parametrize("stage", STAGES[1:])  # DeepSpeed has no stage 0 of this mix
def test_bfloat16_accumulated_in_float32(stage):
    run_ranks(check_bfloat16, 2, stage, IN_FP32, limit_s=90)


def check_bfloat16(rank, world_size, stage, config=None):
    config = {"bf16": {"enabled": True}, **(config or {})}
    for gas, clip in ((1, 0.0), (2, 0.1)):
        engine = check_zero(rank, world_size, stage, gas=gas, clip=clip, **config)
    if stage == 1 and "data_types" in config:
        assert type(engine.optimizer).__name__ == "BF16_Optimizer"

"""Under ZeRO every stage trains exactly as one process."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, check_zero

by_stage = pytest.mark.parametrize("stage", STAGES)


@by_stage
@pytest.mark.parametrize("ranks", [2, 3])
def test_accumulation_and_clipping(stage, ranks):
    run_ranks(check_accumulation_and_clipping, ranks, stage, limit_s=90)


def check_accumulation_and_clipping(rank, world_size, stage):
    for gas in (1, 2):
        for clip in (0.0, 0.1):
            check_zero(rank, world_size, stage, gas=gas, clip=clip)


@by_stage
def test_bfloat16(stage):
    run_ranks(check_bfloat16, 2, stage, limit_s=90)


def check_bfloat16(rank, world_size, stage):
    for clip in (0.0, 0.1):
        check_zero(rank, world_size, stage, clip=clip, bf16={"enabled": True})

"""Settings of a ds_config that change how DeepSpeed works, and no number."""

import pytest

from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, check_zero

BF16 = {"bf16": {"enabled": True}}
ON_CPU = {"device": "cpu"}
# Name -> the stages that take it, and what is written.
SETTINGS = {
    "overlap_comm": ((1, 2, 3), {"zero": {"overlap_comm": True}}),
    "no_overlap_comm": ((3,), {"zero": {"overlap_comm": False}}),
    "offload_optimizer": ((1, 2, 3), {"zero": {"offload_optimizer": ON_CPU}}),
    "offload_optimizer_bf16": ((1, 2, 3), {"zero": {"offload_optimizer": ON_CPU}, **BF16}),
    "offload_param": ((3,), {"zero": {"offload_param": ON_CPU, "offload_optimizer": ON_CPU}}),
    "small_buckets": (
        (1, 2, 3),
        {"zero": {"reduce_bucket_size": 64, "allgather_bucket_size": 64}},
    ),
    "small_sub_groups": ((3,), {"zero": {"sub_group_size": 64, "stage3_prefetch_bucket_size": 0}}),
    "persistent_parameters": ((3,), {"zero": {"stage3_param_persistence_threshold": 10**5}}),
    "no_reduce_scatter": ((1, 2, 3), {"zero": {"reduce_scatter": False}}),
    "one_bucket_per_rank": ((1, 2), {"zero": {"use_multi_rank_bucket_allreduce": False}}),
    "no_norm": ((1, 2), {"clip": 0.0, "zero": {"compute_grad_norm": False}}),
    "no_overflow_check": ((1, 2), {"bf16": {"enabled": True, "check_grad_overflow": False}}),
    # DeepSpeed refuses these two with reduce_scatter at stages 2 and 3; where the factor is the number of
    # ranks its stage 3 divides by it twice.
    "predivided": (STAGES, {"gradient_predivide_factor": 4.0, "zero": {"reduce_scatter": False}}),
    "prescaled": (STAGES, {"prescale_gradients": True, "zero": {"reduce_scatter": False}}),
    "communication_in_fp32": (STAGES, {"communication_data_type": "fp32", **BF16}),
    "communication_in_bf16": (STAGES, {"communication_data_type": "bf16"}),
    "summed": ((0, 1, 2), {"gradient_allreduce_op": "sum"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_stay_the_same(name):
    run_ranks(check_setting, 2, name, limit_s=90)


def check_setting(rank, world_size, name):
    stages, config = SETTINGS[name]
    oracle = {"factor": world_size if name == "summed" else 1}
    for stage in stages:
        try:
            check_zero(rank, world_size, stage, oracle=oracle, **{"gas": 2, "clip": 0.1, **config})
        except AssertionError as error:
            raise AssertionError(f"stage {stage}: {error}") from error


def test_secondary_partitions_of_stage_3():
    run_ranks(check_secondary_partitions, 4, limit_s=90)


def check_secondary_partitions(rank, world_size):
    for config in ({}, BF16):
        check_zero(rank, world_size, 3, gas=2, zero={"zero_hpz_partition_size": 2}, **config)

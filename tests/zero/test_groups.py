"""Several param groups, as DeepSpeed's users give them: each with rates and a momentum of its own."""

import dmuon
import pytest
from torch.optim import lr_scheduler

from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, check_zero, deepspeed_ready, make_engine

by_stage = pytest.mark.parametrize("stage", STAGES)
MUON = {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.1}
ADAMW = {"adamw_lr": 5e-4, "adamw_betas": (0.8, 0.99), "adamw_eps": 1e-7}
AS_THE_ORACLE_SAYS = {"lr": 5e-4, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}


def in_the_second(name):
    return name.startswith(("blocks.1", "head"))


def groups_of(model):
    first = [p for n, p in model.named_parameters() if not in_the_second(n)]
    second = [p for n, p in model.named_parameters() if in_the_second(n)]
    return [{"params": first}, {"params": second, **MUON, **ADAMW}]


def from_the_config(config, model):
    return make_engine(config, model, model_parameters=groups_of(model))


def one_by_one(config, model):
    """The calls of those who make the optimizer themselves."""
    deepspeed = deepspeed_ready()
    del config["optimizer"]
    groups = groups_of(model)
    plan = dmuon.dedicate_params_zero(model, config)
    optimizer = dmuon.zero.OwnerOptimizer(groups, plan=plan)
    schedule = lr_scheduler.LambdaLR(optimizer, halves)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=schedule
    )
    dmuon.zero.attach(engine, plan)
    return engine


def halves(step):
    return 0.5**step


@by_stage
def test_groups(stage):
    run_ranks(check_groups, 2, stage, limit_s=90)


def check_groups(rank, world_size, stage):
    names = {"blocks.1." + name for name in BLOCK} | {"head.weight", "head.bias"}
    oracle = {"second": (names, MUON, AS_THE_ORACLE_SAYS)}
    zero = {"sub_group_size": 64, "reduce_bucket_size": 64} if stage == 3 else {}
    for config in ({"gas": 2, "clip": 0.1}, {"bf16": {"enabled": True}}):
        config = {**config, "zero": zero, "oracle": oracle}
        check_zero(rank, world_size, stage, make=from_the_config, **config)
        config["oracle"] = {**oracle, "settings_at": lambda step: {"lr": halves(step)}}
        check_zero(rank, world_size, stage, make=one_by_one, **config)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_group_with_lr_and_weight_decay(stage):
    """As torch's users write groups: they are both routes'."""
    run_ranks(check_two_settings, 2, stage, limit_s=90)


def check_two_settings(rank, world_size, stage):
    names = {"blocks.1." + name for name in BLOCK} | {"head.weight", "head.bias"}
    muon = {"lr": 0.005, "weight_decay": 0.2}
    adamw = {"lr": 1e-3 * 0.005 / 0.02, "weight_decay": 0.2}

    def make(config, model):
        first, second = groups_of(model)
        groups = [first, {"params": iter(second["params"]), **muon}]
        return make_engine(config, model, model_parameters=groups)

    check_zero(
        rank, world_size, stage, make=make, oracle={"second": (names, muon, adamw)}, params=BASE
    )


BASE = {"lr": 0.02, "adamw_lr": 1e-3}
BLOCK = ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias")

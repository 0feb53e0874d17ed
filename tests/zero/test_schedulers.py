"""Learning rates and momenta follow the schedulers that DeepSpeed's users write, as in one process."""

import functools

import dmuon
import pytest
import torch
from torch.optim import lr_scheduler

from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, check_zero, deepspeed_ready, make_engine

LR, STEPS = 0.02, 4
FROM_THE_CONFIG = {
    "WarmupLR": {"warmup_min_lr": 0.002, "warmup_max_lr": 0.02, "warmup_num_steps": 3},
    "WarmupDecayLR": {"warmup_max_lr": 0.02, "warmup_num_steps": 2, "total_num_steps": 6},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 6, "cos_min_ratio": 0.1},
    "OneCycle": {"cycle_min_lr": 0.002, "cycle_max_lr": 0.02, "cycle_first_step_size": 2},
}
FROM_TORCH = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=1e-4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.002, 0.02, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=6),
}
by_stage = pytest.mark.parametrize("stage", STAGES)


def as_plain_torch_has_it(make):
    """Settings of each step under the same scheduler, over an optimizer that has nothing to do with ours."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.95)
    scheduler, settings = make(optimizer), []
    for _ in range(STEPS):
        group = optimizer.param_groups[0]
        settings.append({"lr": group["lr"] / LR, "momentum": group["momentum"]})
        optimizer.step()
        scheduler.step()
    return {"settings_at": settings.__getitem__}


@by_stage
def test_schedulers_of_the_config(stage):
    run_ranks(check_schedulers_of_the_config, 2, stage, limit_s=90)


def check_schedulers_of_the_config(rank, world_size, stage):
    deepspeed_ready()
    from deepspeed.runtime import lr_schedules

    for name, params in FROM_THE_CONFIG.items():
        oracle = as_plain_torch_has_it(functools.partial(getattr(lr_schedules, name), **params))
        scheduler = {"type": name, "params": params}
        check_zero(rank, world_size, stage, scheduler=scheduler, oracle=oracle, steps=STEPS, gas=2)


@by_stage
def test_schedulers_of_torch(stage):
    run_ranks(check_schedulers_of_torch, 2, stage, limit_s=90)


def check_schedulers_of_torch(rank, world_size, stage):
    for name, scheduler in FROM_TORCH.items():
        for make in (as_instance,) if "Cycl" in name else (as_instance, as_callable):
            oracle = as_plain_torch_has_it(scheduler)
            make = functools.partial(make, scheduler=scheduler)
            check_zero(rank, world_size, stage, make=make, oracle=oracle, steps=STEPS)


def as_callable(config, model, scheduler):
    return make_engine(config, model, lr_scheduler=scheduler)


def as_instance(config, model, scheduler):
    """Which needs the optimizer, so the calls are made one by one."""
    deepspeed = deepspeed_ready()
    del config["optimizer"]
    plan = dmuon.dedicate_params_zero(model, config)
    optimizer = dmuon.zero.OwnerOptimizer(model.parameters(), plan=plan, lr=LR)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler(optimizer)
    )
    dmuon.zero.attach(engine, plan)
    return engine

"""Whole dictionaries under ZeRO: those of one process, loaded on every runtime, stage and number of ranks."""

from functools import partial

import dmuon
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.checkpoints import kinds
from tests.checkpoints.test_whole import Rich, as_lists, assert_like
from tests.support.models import Net
from tests.support.ranks import run_ranks
from tests.support.weights import assert_same
from tests.support.zero import STAGES, ds_config, loss_of, make_engine, train, weights
from tests.support.zero_checkpoints import config_of
from tests.zero.test_loss_scale import fp16_supported

by_stage = pytest.mark.parametrize("stage", STAGES)
TOLERANCE = 2e-5  # of summing in another order, as in tests/checkpoints
ON_CPU = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}


def flat(state):
    return {f"{n}: {k}": v for n, entry in state.items() for k, v in entry.items()}


def whole(engine):
    """On every rank, and copies, as always."""
    model = dmuon.get_model_state_dict(engine, rank0_only=False)
    return model, dmuon.get_optimizer_state_dict(engine, engine.optimizer, rank0_only=False)


def load(engine, model, optimizer):
    dmuon.set_model_state_dict(engine, model)
    dmuon.set_optimizer_state_dict(engine, engine.optimizer, optimizer)


def assert_whole(engine, model, optimizer):
    """Bitwise."""
    got = whole(engine)
    assert_same(got[0], model)
    assert_same(flat(got[1]["state"]), flat(optimizer["state"]))
    assert got[1]["param_groups"] == optimizer["param_groups"]


# Going on --------------------------------------------------------------------------------------

SETTINGS = {  # name -> stages, config, dtype of the model
    "fp32": (STAGES, {}, torch.float32),
    "bf16": (STAGES, BF16, torch.float32),
    "bf16_model": (STAGES, BF16, torch.bfloat16),
    "bf16_optimizer": (
        (1,),
        {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        torch.bfloat16,
    ),
    "fp16": ((1, 2, 3), {"fp16": {"enabled": True, "loss_scale": 128}}, torch.float16),
    "offload": ((1, 2, 3), {**BF16, "zero": {"offload_optimizer": ON_CPU}}, torch.float32),
    "offload_param": (
        (3,),
        {"zero": {"offload_param": ON_CPU, "offload_optimizer": ON_CPU}},
        torch.float32,
    ),
    "persistent": (
        (3,),
        {**BF16, "zero": {"stage3_param_persistence_threshold": 10**5}},
        torch.float32,
    ),
    "sub_groups": ((3,), {"zero": {"sub_group_size": 64}}, torch.float32),
    "secondary": ((3,), {**BF16, "zero": {"zero_hpz_partition_size": 2}}, torch.float32),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_training_goes_on_as_if_nothing_had_happened(name):
    if name == "fp16" and not fp16_supported():
        pytest.skip("DeepSpeed: Type fp16 is not supported on this machine's CPU")
    run_ranks(check_goes_on, 2, name, limit_s=90)


def check_goes_on(rank, world_size, name):
    """Into an engine that has not stepped yet, and into one that has. The first loss is the one that the engine
    which was saved has: what computes is not of yesterday."""
    stages, config, dtype = SETTINGS[name]
    for stage in stages:
        start = partial(make_engine, config_of(stage, **config), lambda: Net().to(dtype))
        engine = start()
        train(engine, 4)  # the rate of the first two is 0
        saved, schedule, kept = whole(engine), engine.lr_scheduler.state_dict(), weights(engine)
        masters = {n for n, entry in saved[1]["state"].items() if "master" in entry}
        assert masters == (set() if dtype == torch.float32 else set(weights(engine)))
        if masters:
            lossy = {n for n, w in kept.items() if not torch.equal(w.to(dtype).float(), w)}
            assert lossy == kept.keys(), "nothing to lose"
        first = loss_of(engine, 4).detach()
        train(engine, 2, first=4)
        want = whole(engine)
        for steps in (0, 3):
            other = start(seed=8)
            train(other, steps)
            load(other, *saved)
            other.lr_scheduler.load_state_dict(schedule)
            assert_whole(other, *saved)
            assert_same(weights(other), kept)
            assert torch.equal(loss_of(other, 4).detach(), first), f"stage {stage}, {steps} steps"
            train(other, 2, first=4)
            assert_whole(other, *want)


def test_what_deepspeed_has_loaded_is_found(tmp_path):
    """At stages 1 and 2 it forgets where states are."""
    run_ranks(check_after_load_checkpoint, 2, str(tmp_path), limit_s=90)


def check_after_load_checkpoint(rank, world_size, folder):
    for stage in STAGES:
        engine = make_engine(config_of(stage, **BF16))
        train(engine, 2)
        engine.save_checkpoint(f"{folder}/{stage}")
        saved = whole(engine)
        train(engine, 1)
        engine.load_checkpoint(f"{folder}/{stage}")
        assert_whole(engine, *saved)


# One process -----------------------------------------------------------------------------------


class Frozen(Rich):
    """Two matrices and two vectors that are one, buffers, and what is not trained."""

    def __init__(self):
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)


@by_stage
def test_they_are_the_dictionaries_of_one_process(stage):
    alone = run_ranks(trained_alone, 1)[0]
    run_ranks(check_like_one_process, 2, stage, alone, limit_s=90)


def trained_alone(rank, world_size):
    """Before the first step, and after three."""
    run = kinds.start("alone", {"make_model": Frozen})
    found = []
    for first, last in ((0, 0), (0, 3)):
        kinds.train(run, first, last)
        model = dmuon.get_model_state_dict(run.model)
        optimizer = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
        state = {name: as_lists(entry) for name, entry in optimizer["state"].items()}
        found.append((as_lists(model), state, optimizer["param_groups"]))
    return found


def check_like_one_process(rank, world_size, stage, alone):
    engine = make_engine(ds_config(stage), Frozen)
    for (model, state, groups), steps in zip(alone, (0, 3), strict=True):
        train(engine, steps)
        got = whole(engine)
        assert_like(got[0], model)
        assert list(got[1]["state"]) == list(state)
        for name, entry in got[1]["state"].items():
            assert_like(entry, state[name])
        renamed = [{**g, "group_name": g["group_name"].replace("default", "0")} for g in groups]
        assert got[1]["param_groups"] == renamed
    assert got[0]["blocks.1.down.weight"] is got[0]["blocks.1.up.weight"]
    assert_options(rank, engine, *got)


def assert_options(rank, engine, model, optimizer):
    """On the first rank alone by default; momenta as torch has them where asked for; copies."""
    first = dmuon.get_model_state_dict(engine, cpu_offload=False)
    for given in (engine.optimizer, engine.dmuon.optimizer):  # any that deepspeed.initialize gives
        state = dmuon.get_optimizer_state_dict(engine.module, given, as_torch=True)
        if rank:
            assert first == {} and state == {}
            continue
        assert_same(first, model)
        groups = {g["lr"]: g for g in state["param_groups"]}
        assert "ns_coefficients" in groups[0.02] and "route" not in groups[0.02]
        momentum = optimizer["state"]["blocks.0.down.weight"]["momentum_buffer"]
        theirs = state["state"]["blocks.0.down.weight"]["momentum_buffer"]
        torch.testing.assert_close(theirs, (1 - 0.95) * momentum)
    kept = {name: value.clone() for name, value in model.items()}
    train(engine, 1, first=3)
    assert_same(model, kept)


# Other runtimes, stages and numbers of ranks ---------------------------------------------------

# One after the other: each loads what the one before has saved, and trains a step.
JOURNEY = [("fsdp2", 2), (3, 3), (1, 2), ("ddp", 2), (0, 3), (2, 1), (3, 2), ("hsdp", 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_training_goes_through_every_runtime(dtype, tmp_path):
    """And ends, in float32, where it would have ended on one."""
    for step, (kind, ranks) in enumerate(JOURNEY):
        run_ranks(check_stop, ranks, kind, dtype, step, str(tmp_path), limit_s=90)
    if dtype == torch.float32:
        run_ranks(check_arrival, 2, str(tmp_path))


def check_stop(rank, world_size, kind, dtype, step, folder):
    model, optimizer, go_on = begin(kind, dtype)
    if step:
        saved = from_file(f"{folder}/{step - 1}")
        dmuon.set_model_state_dict(model, saved[0])
        dmuon.set_optimizer_state_dict(model, optimizer, saved[1])
        got = both(model, optimizer)
        # FSDP2 and DDP train what is not dedicated in bfloat16, without a float32 copy.
        others = isinstance(kind, str) or isinstance(JOURNEY[step - 1][0], str)
        dedicated_alone = others and dtype == torch.bfloat16
        if rank == 0:
            assert_same(got[0], saved[0])
            assert_same(states(got[1], dedicated_alone), states(saved[1], dedicated_alone))
    go_on(step, step + 1)
    saved = both(model, optimizer)
    if rank == 0:
        torch.save(saved, f"{folder}/{step}")


def begin(kind, dtype):
    def make_model():
        return Net().to(dtype)

    if isinstance(kind, str):
        run = kinds.start(kind, {"make_model": make_model, "criterion": mean_square})
        return run.model, run.optimizer, partial(kinds.train, run)
    changes = {} if dtype == torch.float32 else BF16
    engine = make_engine(ds_config(kind, **changes), make_model, seed=8)
    return engine, engine.optimizer, lambda first, last: train(engine, last - first, first)


def mean_square(model, x, y):
    return F.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


def both(model, optimizer):
    """The first rank's; the others' are empty."""
    optimizer = dmuon.get_optimizer_state_dict(model, optimizer)
    return dmuon.get_model_state_dict(model), optimizer


def from_file(path):
    return torch.load(path, weights_only=True) if dist.get_rank() == 0 else ({}, {})


def states(optimizer, dedicated_alone):
    return flat(
        {
            name: entry
            for name, entry in optimizer["state"].items()
            if "momentum_buffer" in entry or not dedicated_alone
        }
    )


def check_arrival(rank, world_size, folder):
    model, optimizer, go_on = begin("fsdp2", torch.float32)
    go_on(0, len(JOURNEY))
    want = both(model, optimizer)
    if rank == 0:
        got = from_file(f"{folder}/{len(JOURNEY) - 1}")
        kinds.assert_close(got[0], want[0], TOLERANCE)
        kinds.assert_close(flat(got[1]["state"]), flat(want[1]["state"]), TOLERANCE)

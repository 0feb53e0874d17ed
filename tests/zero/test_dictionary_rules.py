"""Whole dictionaries under ZeRO: what does not fit, what starts anew, and what a rank holds meanwhile."""

import contextlib
import copy
import gc
from functools import partial, wraps
from unittest import mock

import deepspeed
import dmuon
import pytest
import torch
import torch.distributed as dist
from dmuon.zero import attach
from torch import nn

from tests.support.models import Net
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks
from tests.support.weights import assert_same
from tests.support.zero import STAGES, deepspeed_ready, ds_config, make_engine, train
from tests.zero.test_errors import initialize
from tests.zero.test_full_dictionaries import BF16, assert_whole, flat, load, whole
from tests.zero.test_misuse import planned

by_stage = pytest.mark.parametrize("stage", STAGES)


@by_stage
def test_what_does_not_fit_changes_nothing(stage):
    run_ranks(check_misfits, 2, stage, limit_s=90)


def without(mapping, *path):
    """A copy that lacks an entry."""
    found = copy.deepcopy(mapping)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return found


def with_entry(mapping, value, *path):
    found = copy.deepcopy(mapping)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def check_misfits(rank, world_size, stage):
    engine = make_engine(ds_config(stage))
    train(engine, 2)
    model, optimizer = whole(engine)
    of_head = ("state", "head.weight")
    bad_models = {
        "missing: 'head.weight'": without(model, "head.weight"),
        "unexpected: 'tail'": with_entry(model, torch.zeros(2), "tail"),
        "'head.bias' has (3,) and not (20,)": with_entry(model, torch.zeros(3), "head.bias"),
    }
    bad_optimizers = {
        "missing: 'head.weight.exp_avg'": without(optimizer, *of_head, "exp_avg"),
        "'inp.bias.exp_avg' has (3,) and not (17,)": with_entry(
            optimizer, torch.zeros(3), "state", "inp.bias", "exp_avg"
        ),
        "state of 'tail'": with_entry(optimizer, {}, "state", "tail"),
        "an lr of 0.0 for Muon and of 0.001": with_entry(optimizer, 0.0, "param_groups", 0, "lr"),
    }
    if stage:  # which count once for a group
        other_step = with_entry(optimizer, torch.tensor(3.0), *of_head, "step")
        bad_optimizers["2 steps of 'inp.weight' and 3 of 'head.weight'"] = other_step
    set_model = partial(dmuon.set_model_state_dict, engine)
    set_optimizer = partial(dmuon.set_optimizer_state_dict, engine, engine.optimizer)
    for call, bad in ((set_model, bad_models), (set_optimizer, bad_optimizers)):
        for words, given in bad.items():
            # On every rank, on the first one alone, and on the second one alone.
            good = model if call is set_model else optimizer
            for mine in (given, given if rank == 0 else {}, given if rank else good):
                assert_all_raise(partial(call, mine), "ValueError", words)
        assert_all_raise(partial(call, good if rank else {}), "ValueError", "empty on this rank")
    assert_whole(engine, model, optimizer)


@by_stage
def test_a_parameter_without_state_starts_anew(stage):
    run_ranks(check_anew, 2, stage, limit_s=90)


def check_anew(rank, world_size, stage):
    """As in a training that begins with these weights."""
    fresh = make_engine(ds_config(stage, **BF16))
    empty = whole(fresh)
    assert {key for entry in empty[1]["state"].values() for key in entry} == {"momentum_buffer"}
    trained = make_engine(ds_config(stage, **BF16), seed=8)
    train(trained, 2)
    load(trained, *empty)
    assert_whole(trained, *empty)
    for engine in (fresh, trained):
        train(engine, 2)
    assert_whole(trained, *whole(fresh))


@by_stage
def test_a_parameter_that_was_not_used(stage):
    run_ranks(check_unused, 2, stage, limit_s=90)


def check_unused(rank, world_size, stage):
    """Its moments are zero; where steps are counted once for a group, it has the group's."""
    engine = make_engine(ds_config(stage))
    train(engine, 2)
    _, optimizer = whole(engine)
    dmuon.set_optimizer_state_dict(
        engine, engine.optimizer, without(optimizer, "state", "inp.bias")
    )
    got = whole(engine)[1]["state"]
    if stage == 0:
        assert "inp.bias" not in got
    else:
        entry = got.pop("inp.bias")
        assert entry["step"] == 2 and not entry["exp_avg"].any() and not entry["exp_avg_sq"].any()
    del optimizer["state"]["inp.bias"]
    assert_same(flat(got), flat(optimizer["state"]))
    train(engine, 1, first=2)


@by_stage
def test_what_is_frozen_on_the_way(stage):
    run_ranks(check_frozen_on_the_way, 2, stage, limit_s=90)


def check_frozen_on_the_way(rank, world_size, stage):
    """Keeps its float32 weight and its state, and takes others."""
    engine, other = (make_engine(ds_config(stage, **BF16), seed=seed) for seed in (7, 8))
    for subject in (engine, other):
        train(subject, 2)
        subject.module.head.requires_grad_(False)
        subject.module.blocks[0].requires_grad_(False)
    saved = whole(engine)
    assert saved[1]["state"]["head.weight"]["step"] == 2
    load(other, *saved)
    assert_whole(other, *saved)
    assert not other.module.head.weight.requires_grad


def from_zero_init(config, seed):
    """Its parameters are partitioned from the beginning."""
    torch.manual_seed(seed)
    deepspeed_ready()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Net()
    return make_engine(config, model)


def test_a_model_that_was_built_in_partitions():
    run_ranks(check_built_in_partitions, 2, limit_s=90)


def check_built_in_partitions(rank, world_size):
    engine = from_zero_init(ds_config(3), 7)
    train(engine, 2)
    saved = whole(engine)
    other = from_zero_init(ds_config(3), 8)
    load(other, *saved)
    for subject in (engine, other):
        train(subject, 1, first=2)
    assert_whole(other, *whole(engine))


class Wide(nn.Module):
    """Eight matrices of DeepSpeed's, as large as those that are dedicated."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 256, bias=False) for _ in range(4))
        self.others = nn.ModuleList(nn.Linear(64, 256, bias=False) for _ in range(8))

    def forward(self, x):
        layers = [*self.blocks, *self.others]
        return sum(layer(x[:, :1].expand(-1, 64)) for layer in layers)[:, :20]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_receives_nothing_holds_one_parameter_at_a_time(stage):
    run_ranks(check_memory, 2, stage, limit_s=90)


def check_memory(rank, world_size, stage):
    engine = make_engine(ds_config(stage), Wide)
    train(engine, 1)
    model, optimizer = whole(engine)
    given = (model, optimizer) if rank == 0 else ({}, {})
    for call in (
        lambda: dmuon.get_model_state_dict(engine),
        lambda: dmuon.get_optimizer_state_dict(engine, engine.optimizer),
        lambda: dmuon.set_model_state_dict(engine, given[0]),
        lambda: dmuon.set_optimizer_state_dict(engine, engine.optimizer, given[1]),
    ):
        held = most_held(call)
        if rank:  # of 12 matrices or 20 states: a whole one, a copy of it that is sent, another that was given
            assert 1 <= held <= 4, held


def most_held(call):
    """Tensors as large as a matrix that are there in any message between ranks, and were not before."""
    gc.collect()
    before, most = large_tensors(), 0

    def counted(original):
        @wraps(original)
        def send(*args, **kwargs):
            nonlocal most
            most = max(most, len(large_tensors() - before))
            return original(*args, **kwargs)

        return send

    with contextlib.ExitStack() as stack:
        for name in ("broadcast", "all_reduce", "all_gather_into_tensor"):
            send = counted(getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, send))
        call()
    return most


def large_tensors():
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if not t.is_meta]
    return {s.data_ptr() for s in storages if s.nbytes() >= 4 * 64 * 256}


KEPT = {  # stage and changes of the config: where DeepSpeed keeps float32 weights
    "fp16_groups": (0, BF16),
    "bf16_groups": (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "single_partition_of_fp32_groups": (2, {}),
    "fp32_partitioned_groups_flat": (3, {}),
}


def test_places_that_have_changed():
    run_ranks(check_places, 2, limit_s=90)


def check_places(rank, world_size):
    """Refused by name, with the version, when an engine is attached."""
    for name, (stage, changes) in KEPT.items():
        model, plan, optimizer = planned(ds_config(stage, **changes))
        plain = ds_config(stage, **changes)
        del plain["optimizer"], plain["dmuon"]
        engine = initialize(model, plain, optimizer=optimizer)[0]
        delattr(engine.optimizer, name)
        words = (name, deepspeed.__version__, "Use DeepSpeed 0.19.8")
        assert_all_raise(partial(attach, engine, plan), "RuntimeError", *words)

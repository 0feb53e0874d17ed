"""Settings of param groups in whole dictionaries under ZeRO: one group there is two here."""

import copy

import dmuon
import pytest
import torch
from dmuon.zero.groups import by_route, rates_problem, take_settings

from tests.checkpoints import kinds
from tests.support.models import Net
from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, ds_config, make_engine, train
from tests.zero.test_full_dictionaries import TOLERANCE, assert_whole, flat, load, whole
from tests.zero.test_groups import from_the_config, in_the_second

by_stage = pytest.mark.parametrize("stage", STAGES)


RATES = [  # of a group here; and as they were saved, by route
    ({"lr": 0.02}, {"muon": 0.013, "adamw": 7e-4}),
    ({"lr": 0.02}, {"muon": 0.01, "adamw": 5e-4}),
    ({"lr": 0.02}, {"muon": 0.0, "adamw": 0.0}),
    ({"lr": 0.02}, {"adamw": 7e-4}),
    ({"lr": 0.02, "adamw_lr": 0.0}, {"adamw": 7e-4}),
    ({"lr": 0.02, "adamw_lr": 0.0}, {"adamw": 0.0}),
    ({"lr": 0.3, "adamw_lr": 0.7}, {"muon": 0.1, "adamw": 0.1}),
]


@pytest.mark.parametrize("group, saved", RATES)
def test_both_rates_are_the_saved_ones(group, saved):
    """And a scheduler that halves the one halves the other."""
    settings = {"momentum": 0.9, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    settings |= {"adamw_lr": 1e-3, "adamw_weight_decay": 0.0, "base_lr": group["lr"]}
    group = settings | group
    assert not rates_problem({route: {"lr": lr} for route, lr in saved.items()})
    take_settings(group, {route: {"lr": lr} for route, lr in saved.items()})
    got = by_route(group)
    assert {route: got[route]["lr"] for route in saved} == saved
    halved = by_route(group | {"lr": group["lr"] / 2})
    for route, lr in saved.items():
        assert halved[route]["lr"] == pytest.approx(lr / 2)


@by_stage
def test_two_groups(stage):
    run_ranks(check_two_groups, 2, stage, limit_s=90)


def check_two_groups(rank, world_size, stage):
    """Of settings of their own; steps are counted for each, and each keeps its own."""
    model = Net()
    engine = from_the_config(ds_config(stage), model)
    train(engine, 2)
    saved = whole(engine)
    groups = {g["group_name"]: g for g in saved[1]["param_groups"]}
    assert list(groups) == ["0/muon", "0/adamw", "1/muon", "1/adamw"]
    assert all(
        in_the_second(name) == (key[0] == "1") for key in groups for name in groups[key]["params"]
    )
    for name in groups["1/adamw"]["params"]:
        saved[1]["state"][name]["step"].fill_(7)
    other = from_the_config(ds_config(stage), Net())
    load(other, *saved)
    assert_whole(other, *saved)
    train(other, 1, first=2)
    steps = {
        n: entry["step"].item() for n, entry in whole(other)[1]["state"].items() if "step" in entry
    }
    assert steps == {n: 8 if in_the_second(n) else 3 for n in steps}


@by_stage
def test_settings_are_those_of_the_dictionary(stage):
    run_ranks(check_settings, 2, stage, limit_s=90)


def check_settings(rank, world_size, stage):
    """Both rates, whatever their ratio is here, and a scheduler's on the way; as under FSDP2."""
    muon = {"lr": 0.013, "momentum": 0.9, "weight_decay": 0.1, "adamw_lr": 7e-4}
    muon |= {"adamw_betas": (0.8, 0.99), "adamw_eps": 1e-7, "adamw_weight_decay": 0.2}
    run = kinds.start("fsdp2", {"make_model": Net}, muon=muon)
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
    kinds.train(run, 0, 2)
    schedule.step()
    saved = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)
    engine = make_engine(ds_config(stage, params={"lr": 0.05, "adamw_lr": 1e-5}))
    dmuon.set_optimizer_state_dict(engine, engine.optimizer, saved)
    dmuon.set_model_state_dict(engine, dmuon.get_model_state_dict(run.model, rank0_only=False))
    groups = copy.deepcopy(whole(engine)[1]["param_groups"])
    for ours, theirs in zip(groups, saved["param_groups"], strict=True):
        given = theirs.pop("initial_lr")  # AdamW's is made of a ratio
        assert ours.pop("initial_lr") == pytest.approx(given, rel=1e-15)
        assert ours | {"group_name": theirs["group_name"]} == theirs
    kinds.train(run, 2, 4)
    train(engine, 2, first=2)
    want = dmuon.get_model_state_dict(run.model, rank0_only=False)
    kinds.assert_close(whole(engine)[0], want, TOLERANCE)


@by_stage
def test_momenta_as_torch_has_them_are_taken(stage):
    run_ranks(check_as_torch, 2, stage, limit_s=90)


def check_as_torch(rank, world_size, stage):
    """A dictionary of torch.optim.Muon's: momenta are means."""
    engine = make_engine(ds_config(stage))
    train(engine, 2)
    saved = whole(engine)[1]
    as_torch = dmuon.get_optimizer_state_dict(
        engine, engine.optimizer, rank0_only=False, as_torch=True
    )
    other = make_engine(ds_config(stage))
    dmuon.set_optimizer_state_dict(other, other.optimizer, as_torch)
    kinds.assert_close(flat(whole(other)[1]["state"]), flat(saved["state"]), 1e-5)

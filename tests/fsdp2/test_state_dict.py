"""model.state_dict() and optimizer.state_dict() are true, or refuse to be read: never wrong."""

import io

import dmuon
import pytest
import torch

from tests.support.models import Net
from tests.support.parity import (
    assert_same,
    clean_name,
    full_weights,
    owned_weights,
    setup,
    three_steps,
)
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("world_size", [2, 4])
def test_state_dict_is_true_on_owners_and_refuses_elsewhere(world_size):
    run_ranks(check_model_state, world_size)


def check_model_state(rank, world_size):
    for asynchronous in (True, False):
        run = setup(world_size, muon={"replicate_async": asynchronous})
        assert_true_or_refusing(run, rank)
        three_steps(run)
        assert_true_or_refusing(run, rank)
        run.loss(5, rank).backward()
        assert_true_or_refusing(run, rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_gathered_state_is_what_one_process_would_save(world_size):
    run_ranks(check_gathered_state, world_size)


def check_gathered_state(rank, world_size):
    run = setup(world_size)
    three_steps(run)
    expected = full_weights(run.model)
    for rank0_only in (True, False):
        state = dmuon.get_model_state_dict(run.model, rank0_only=rank0_only)
        if rank0_only and rank > 0:
            assert state == {}
            continue
        assert set(state) == set(dict(Net().named_parameters()))
        for name, value in state.items():
            assert torch.equal(value, expected[name]), name


def assert_true_or_refusing(run, rank):
    state = run.model.state_dict()
    assert {clean_name(n) for n in state} == set(dict(Net().named_parameters()))
    weights = owned_weights(run.model)
    for p in dmuon.get_dedicated_params(run.model):
        value = state[p.fqn]
        assert value.shape == p.full_shape and value.dtype == torch.float32
        if p.is_owner:
            assert torch.equal(torch.as_tensor(value), weights[p.fqn]), p.fqn
        else:
            assert_unreadable(value, p)


def assert_unreadable(value, p):
    """Reading, copying and saving are refused with the owner's rank and the call to use."""
    for read in (
        lambda: value.sum().item(),
        lambda: value + 1,
        lambda: value.clone(),
        lambda: torch.empty(value.shape).copy_(value),
        lambda: torch.save(value, io.BytesIO()),
    ):
        with pytest.raises(RuntimeError, match=r"dmuon\.get_model_state_dict") as info:
            read()
        assert f"rank {p.owner_rank}" in str(info.value), info.value
        assert p.fqn in str(info.value), info.value


@pytest.mark.parametrize("world_size", [2])
def test_the_state_dict_of_a_part_is_true_too(world_size):
    run_ranks(check_part, world_size)


def check_part(rank, world_size):
    run = setup(world_size)
    three_steps(run)
    weights = owned_weights(run.model)
    state = run.model.blocks[1].state_dict()
    for p in dmuon.get_owned_params(run.model, rank):
        if p.fqn.startswith("blocks.1."):
            value = state[p.fqn.removeprefix("blocks.1.")]
            assert torch.equal(torch.as_tensor(value), weights[p.fqn])


@pytest.mark.parametrize("world_size", [2, 4])
def test_loading_its_own_state_dict_changes_nothing(world_size):
    run_ranks(check_reload, world_size)


def check_reload(rank, world_size):
    """`load_state_dict(state_dict())`, then training: as if it had not happened."""
    reference, run = setup(world_size), setup(world_size)
    for r in (reference, run):
        three_steps(r)
    before = full_weights(run.model)
    run.model.load_state_dict(run.model.state_dict())
    assert_same(full_weights(run.model), before)
    for r in (reference, run):
        r.train(3)
    assert_same(full_weights(run.model), full_weights(reference.model))


@pytest.mark.parametrize("world_size", [2])
def test_the_optimizers_state_dict_is_true_or_refuses(world_size):
    run_ranks(check_optimizer_state, world_size)


def check_optimizer_state(rank, world_size):
    run = setup(world_size)
    empty = run.optimizer.state_dict()
    three_steps(run)
    state = run.optimizer.state_dict()
    assert empty["param_groups"][0]["params"] == state["param_groups"][0]["params"]
    order = [p for g in run.optimizer.param_groups for p in g["params"]]
    for p in dmuon.get_owned_params(run.model, rank):
        slot = run.model.get_parameter(p.fqn)
        index = next(i for i, q in enumerate(order) if q is slot)
        momentum = [v for v in state["state"][index].values() if getattr(v, "ndim", 0) == 2]
        assert momentum and torch.isfinite(momentum[0]).all() and momentum[0].abs().sum() > 0

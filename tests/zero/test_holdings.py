"""What each rank holds and does: exact bytes and counts, none timed."""

import functools
import itertools

import dmuon
import pytest
import torch

from tests.support.models import Net
from tests.support.ranks import run_ranks
from tests.support.weights import PLACEHOLDER_BYTES, assert_same, total
from tests.support.zero import STAGES, ds_config, loss_of, make_engine, train, weights
from tests.zero.test_models import Side

by_stage = pytest.mark.parametrize("stage", STAGES)
BF16 = {"bf16": {"enabled": True}}


def storage_bytes(tensors):
    """Of what lies in memory, each storage once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def elements(params):
    return sum(p.numel for p in params)


@by_stage
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_are_where_the_stage_has_them(stage, ranks):
    run_ranks(check_weights_are_where_the_stage_has_them, ranks, stage, limit_s=90)


def check_weights_are_where_the_stage_has_them(rank, world_size, stage):
    for config, size in (({}, 4), (BF16, 2)):
        engine = make_engine(ds_config(stage, **config))
        assert_residency(engine, stage, size)
        train(engine, 2)
        assert_residency(engine, stage, size)
        with torch.no_grad():
            loss_of(engine, 3)
        assert_residency(engine, stage, size)


def assert_residency(engine, stage, size):
    """At stages 0 to 2 weights are whole everywhere, and a master of the same dtype is no second copy; at
    stage 3 they are there while they are used."""
    params = dmuon.get_dedicated_params(engine)
    shown = [engine.module.get_buffer(p.fqn) for p in params]
    masters = [p._owned_data for p in params]
    owned = elements(p for p in params if p.is_owner)
    if stage == 3:
        assert storage_bytes(shown) <= PLACEHOLDER_BYTES * len(params)
        assert storage_bytes(masters) == 4 * owned
    else:
        assert storage_bytes(shown) == size * elements(params)
        copies = 0 if size == 4 else 4 * owned
        assert storage_bytes(shown + masters) == size * elements(params) + copies


@by_stage
def test_masters_momenta_and_gradients_are_on_owners_alone(stage):
    run_ranks(check_owners_alone, 3, stage, limit_s=90)


def check_owners_alone(rank, world_size, stage):
    for config in ({}, BF16):
        engine = make_engine(ds_config(stage, **config))
        train(engine, 1)
        engine.backward(loss_of(engine, 1))
        dmuon.wait_all_reduces(engine)
        params = dmuon.get_dedicated_params(engine)
        mine = [p for p in params if p.owner_rank == rank]
        assert [p.fqn for p in mine] == [p.fqn for p in dmuon.get_owned_params(engine, rank)]
        assert total(len(mine)) == len(params)
        state = engine.dmuon.optimizer.dedicated.state
        momenta = [t for index in range(len(params)) for t in state(index).values()]
        assert storage_bytes(momenta) == 4 * elements(mine)
        assert all((p._owned_data is not None) == (p in mine) for p in params)
        assert all((p.parameter.grad is not None) == (p in mine) for p in params)


@by_stage
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_newton_schulz_per_matrix_and_step_in_the_whole_job(stage, ranks):
    run_ranks(check_ns_calls, ranks, stage, limit_s=90)


def check_ns_calls(rank, world_size, stage):
    engine = make_engine(ds_config(stage, gas=2))
    matrices = len(engine.dmuon.plan)
    for steps in (1, 2, 3):
        train(engine, 1, first=steps)
        report = dmuon.report(engine)
        assert total(report["ns_calls_last_step"]) == matrices
        assert total(report["ns_calls"]) == steps * matrices


@by_stage
def test_only_stage_3_fetches_and_it_does_so_ahead_of_use(stage):
    run_ranks(check_fetches, 2, stage, limit_s=90)


def check_fetches(rank, world_size, stage):
    engine = make_engine(ds_config(stage), make_model=lambda: Net(((17, 29),) * 4))
    fetches, ahead = [], []
    for step in range(4):
        train(engine, 1, first=step)
        report = dmuon.report(engine)
        fetches.append(report["materialisations"])
        ahead.append(report["prefetches"])
    if stage < 3:
        assert ahead == [0] * 4 and len(set(fetches)) == 1, "whole since setup"
    else:
        units = 4
        assert [b - a for a, b in itertools.pairwise(fetches)] == [2 * units] * 3
        assert all(b - a >= units - 1 for a, b in itertools.pairwise(ahead)), ahead


def test_fetching_ahead_changes_no_bits():
    run_ranks(check_fetching_ahead, 2, limit_s=90)


def in_order(model, x, step, rank, orders):
    return model(x, orders[step % 2])


class Pair(Side):
    """Two of the blocks, called in the order that is asked for."""

    def forward(self, x, order):
        x = self.inp(x)
        ways = {i: self.blocks[i](x) for i in order}
        return self.head(ways[0] + ways[1])


def check_fetching_ahead(rank, world_size):
    """Two blocks side by side, in one order; and in two by turns, where guesses go wrong."""
    runs = []
    for orders in (((0, 1), (0, 1)), ((0, 1), (1, 0))):
        engine = make_engine(ds_config(3), make_model=Pair)
        train(engine, 4, forward=functools.partial(in_order, orders=orders))
        runs.append((weights(engine), dmuon.report(engine)["materialisations"]))
    (steady, fetches), (by_turns, more) = runs
    assert_same(by_turns, steady)
    assert more > fetches, "what was fetched in vain"

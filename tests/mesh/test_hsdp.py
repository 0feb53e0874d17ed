"""Hybrid sharding: one owner for all replicas, and a publish that nobody sees unfinished."""

from functools import partial

import dmuon
import pytest
import torch
from torch import nn

from tests.support.meshes import dp_tp, flat, hsdp, on, run_on
from tests.support.models import INPUTS, OUTPUTS, Bare, Net, shard
from tests.support.parity import (
    assert_same,
    check_parity,
    full_weights,
    gathered,
    read_between_steps,
    setup,
    three_steps,
    total,
)
from tests.support.ranks import run_fresh
from tests.support.tp_models import subject
from tests.support.weights import local

FOUR = [hsdp(2, 2), hsdp(1, 4), hsdp(4, 1)]


def seven_blocks():
    return Net(dims=((13, 7),) * 7)


def weights_of(layout, steps=3, **options):
    run = setup(layout, **options)
    for step in range(steps):
        run.train(step)
    return full_weights(run.model)


# Owners ----------------------------------------------------------------------------------------


@on([hsdp(2, 2), hsdp(4, 1), hsdp(2, 4)])
def test_owners_spread_over_both_axes_and_run_newton_schulz_once(layout):
    run_on(layout, check_owners)


def check_owners(rank, layout):
    run = setup(layout, make_model=seven_blocks)
    three_steps(run)
    report = dmuon.report(run.model)
    owned = dmuon.get_owned_params(run.model, rank)
    assert {p.owner_rank for p in dmuon.get_dedicated_params(run.model)} == set(range(layout.ranks))
    assert {p.owner_rank for p in owned} == {rank} and all(p.is_owner for p in owned)
    assert report["ns_calls_last_step"] == len(owned)
    assert total(report["ns_calls_last_step"]) == 14
    assert max(gathered(len(owned))) - min(gathered(len(owned))) <= 1, "equal matrices, equal loads"


@on([hsdp(4, 1), hsdp(2, 2), hsdp(2, 4)])
def test_more_replicas_than_matrices(layout):
    run_on(layout, check_few_matrices)


def check_few_matrices(rank, layout):
    for predicate in (only_the_first_up, only_the_first_block):
        run = check_parity(rank, layout, predicate=predicate)
        params = dmuon.get_dedicated_params(run.model)
        assert len({p.owner_rank for p in params}) == len(params), "one matrix each"


def only_the_first_up(name, param):
    return name == "blocks.0.up.weight"


def only_the_first_block(name, param):
    return "blocks.0" in name and param.ndim == 2


@on(FOUR)
def test_weights_kept_from_forward_to_backward(layout):
    run_on(layout, check_kept)


def check_kept(rank, layout):
    check_parity(
        rank,
        layout,
        wrap=partial(shard, reshard_after_forward=False),
        dedicate={"reshard_after_forward": False},
        transient=False,
    )


# Bitwise ---------------------------------------------------------------------------------------


@on(FOUR)
def test_publishing_and_packing_change_no_bit(layout):
    run_on(layout, check_bitwise)


def check_bitwise(rank, layout):
    of = partial(weights_of, layout, make_model=seven_blocks)
    reference = of(muon={"replicate_async": False})
    assert_same(of(muon={"replicate_async": True}), reference)
    assert_same(of(dedicate={"pack_small_params": False}), reference)
    assert_same(of(dedicate={"process_group_policy": "shared"}), reference)


def test_one_replica_is_no_replica_axis_bit_for_bit():
    run_on(hsdp(1, 4), check_one_replica)


def check_one_replica(rank, layout):
    assert_same(weights_of(layout), weights_of(flat(layout.ranks)))


def test_one_shard_is_no_shard_axis_bit_for_bit():
    run_on(hsdp(4, 1), check_one_shard)


def check_one_shard(rank, layout):
    """All weights dedicated: FSDP2 itself sums in another order with a replicate axis."""
    options = {"make_model": OnlyMatrices, "predicate": lambda n, p: True}
    assert_same(weights_of(layout, **options), weights_of(flat(layout.ranks), **options))


class OnlyMatrices(Net):
    def __init__(self):
        super().__init__(block=Bare)
        self.inp = nn.Linear(INPUTS, 17, bias=False)
        self.head = nn.Linear(17, OUTPUTS, bias=False)


# The asynchronous publish ----------------------------------------------------------------------


@on(FOUR)
def test_whoever_reads_after_an_asynchronous_step_sees_the_whole_update(layout):
    run_on(layout, check_readers)


def check_readers(rank, layout):
    seen = [list(read_after_each_step(layout, publish)) for publish in (True, False)]
    for asynchronous, synchronous in zip(*seen, strict=True):
        assert_same(asynchronous, synchronous)
    outputs = [step["output"] for step in seen[0] if "output" in step]
    assert not torch.equal(*outputs), "training changed nothing"


def read_after_each_step(layout, asynchronous):
    run = setup(layout, muon={"lr": 0.5, "replicate_async": asynchronous}, **subject(layout))
    return read_between_steps(run, (evaluated, collected, saved, stepped_again, owned, evaluated))


def evaluated(run, x):
    with torch.no_grad():
        return {"output": run.model(x)}


def collected(run, x):
    return full_weights(run.model)


def saved(run, x):
    return dmuon.get_model_state_dict(run.model, rank0_only=False)


def stepped_again(run, x):
    run.optimizer.step()
    return full_weights(run.model)


def owned(run, x):
    """What state_dict shows of the matrices this rank owns."""
    state = run.model.state_dict()
    mine = dmuon.get_owned_params(run.model, torch.distributed.get_rank())
    return {p.fqn: torch.as_tensor(local(state[p.fqn])).clone() for p in mine}


@on([*FOUR, dp_tp(2, 2)])
def test_manual_control_is_legal_at_any_moment_and_changes_no_bit(layout):
    run_on(layout, check_manual_control)


def check_manual_control(rank, layout):
    reference = weights_of(layout, **subject(layout))
    run = setup(layout, **subject(layout))
    for step in range(3):
        control(run.model)
        loss = run.loss(step, run.ranks[0])
        control(run.model)
        loss.backward()
        control(run.model)
        run.step()
        control(run.model)
    assert_same(full_weights(run.model), reference)


def control(model):
    for _ in range(2):
        dmuon.wait_all_reduces(model)
        dmuon.prepare_muon_grads(model)
        dmuon.broadcast_all_updates_async(model)
        dmuon.broadcast_all_updates(model)
        dmuon.wait_all_replicate_broadcasts(model)


@on([*FOUR, dp_tp(2, 2)])
def test_a_model_reloaded_with_its_own_state_trains_on_as_before(layout):
    run_on(layout, check_reloaded)


def check_reloaded(rank, layout):
    """What a rank does not own it cannot load; it must take part in publishing all the same."""
    runs = [setup(layout, **subject(layout)) for _ in range(2)]
    for run in runs:
        three_steps(run)
    before = full_weights(runs[1].model)
    runs[1].model.load_state_dict(runs[1].model.state_dict())
    assert_same(full_weights(runs[1].model), before)
    for run in runs:
        run.train(3)
    assert_same(full_weights(runs[1].model), full_weights(runs[0].model))


EXIT = """
import torch.distributed as dist
from tests.support.meshes import hsdp
from tests.support.parity import setup

dist.init_process_group("gloo")
run = setup(hsdp(2, 1), muon={{"replicate_async": True}})
run.loss(0, run.ranks[0]).backward()
run.optimizer.step()
{then}
print("done")
"""


@pytest.mark.parametrize("then", ["", "dist.destroy_process_group()"])
def test_a_script_may_end_right_after_a_step(then):
    for printed in run_fresh(EXIT.format(then=then), 2):
        assert "done" in printed

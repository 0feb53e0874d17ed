"""Whatever a script does between two steps, it does on meshes too."""

import copy
from functools import partial

import dmuon
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp2.test_moments import interleaved_idle_steps, step_twice, zero_grad_everywhere
from tests.support.meshes import cube, dp_tp, hsdp, on, run_on
from tests.support.models import Net, in_blocks, shard
from tests.support.oracle import Oracle, relative_error, tolerance
from tests.support.parity import (
    Run,
    assert_same,
    check_parity,
    full_weights,
    gathered,
    setup,
    three_steps,
)
from tests.support.tp_models import (
    MIXED,
    subject,
)

# Moments of a step -------------------------------------------------------------------------------


@on([dp_tp(2, 2), hsdp(2, 2)])
def test_moments_of_a_step(layout):
    run_on(layout, check_moments)


def check_moments(rank, layout):
    for script in (
        interleaved_idle_steps,
        step_twice,
        zero_grad_everywhere("optimizer", True),
        zero_grad_everywhere("model", False),
        halved_between_passes,
    ):
        check_parity(rank, layout, script, **subject(layout))


def halved_between_passes(run):
    """An accumulating script that scales what it has so far."""
    for step in range(2):
        for part in range(2):
            for rank in run.ranks:
                run.loss(10 * step + part, rank).backward()
            if part == 0:
                halve(run)
        run.step()


def halve(run):
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@on([dp_tp(2, 2), cube(2, 1, 2)])
def test_weights_kept_from_forward_to_backward(layout):
    run_on(layout, check_kept)


def check_kept(rank, layout):
    check_parity(
        rank,
        layout,
        wrap=partial(shard, reshard_after_forward=False),
        dedicate={"reshard_after_forward": False},
        transient=False,
        **MIXED,
    )


@on([dp_tp(2, 2), hsdp(2, 2)])
def test_gradients_changed_by_hand_count(layout):
    run_on(layout, check_changed_gradients)


def check_changed_gradients(rank, layout):
    check_parity(rank, layout, halve_gradients, **subject(layout))


def halve_gradients(run):
    """As a script does that unscales or clips by itself."""
    for step in range(3):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        halve(run)
        run.step()


# State -----------------------------------------------------------------------------------------


@on([dp_tp(2, 2), hsdp(2, 2), cube(2, 1, 2)])
def test_the_optimizers_state_continues_a_run_bit_for_bit(layout):
    run_on(layout, check_round_trip)


def check_round_trip(rank, layout):
    run = setup(layout, **subject(layout))
    three_steps(run)
    saved, weights = copy.deepcopy(run.optimizer.state_dict()), full_weights(run.model)
    other = setup(layout, **subject(layout) | {"make_model": partial(loaded, layout, weights)})
    other.optimizer.load_state_dict(saved)
    for r in (run, other):
        r.train(3)
    assert_same(full_weights(other.model), full_weights(run.model))


def loaded(layout, weights):
    model = subject(layout).get("make_model", Net)()
    model.load_state_dict(weights)
    return model


# Stages of a pipeline ----------------------------------------------------------------------------


def test_stages_of_a_pipeline_train_their_own_weights():
    run_on(hsdp(2, 2), check_stages)


def check_stages(rank, layout):
    """The other ranks of the job hold other weights: one model per stage, on two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, mine = divmod(rank, 2)
    plain = stage_model(stage)
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    model = copy.deepcopy(plain)
    dmuon.dedicate_params(model, mesh["dp"], predicate=in_blocks, independent_dims=("pp",))
    shard(model, mesh["dp"])
    run = Run(model, dmuon.Muon(model), [mine], 2, managed=True)
    three_steps(run)
    chosen = {n for n, p in plain.named_parameters() if in_blocks(n, p)}
    three_steps(Run(plain, Oracle(plain, chosen), [0, 1], 2, managed=False))
    for p in dmuon.get_owned_params(model, rank):
        want = plain.get_parameter(p.fqn)
        assert p.owner_rank == rank and not torch.equal(want, start[p.fqn])
        assert relative_error(p._owned_data, want) <= 2 * tolerance(3), p.fqn
    owned = gathered([p.fqn for p in dmuon.get_owned_params(model, rank)])
    for first in (0, 2):
        assert sorted(owned[first] + owned[first + 1]) == sorted(stage_names(first // 2))


def stage_model(stage):
    torch.manual_seed(7 + stage)
    return Net(dims=((17, 29), (17, 18)) if stage == 0 else ((13, 7),) * 3)


def stage_names(stage):
    return [n for n, p in stage_model(stage).named_parameters() if in_blocks(n, p)]

"""The figures a user pays for: NS calls, bytes on the wire, memory. All exact, none timed."""

import gc
import json
import weakref

import dmuon
import pytest
import torch

from tests.support.models import Bare, Net, in_blocks, shard
from tests.support.parity import (
    PLACEHOLDER_BYTES,
    clean_name,
    cpu_mesh,
    setup,
    three_steps,
    total,
)
from tests.support.ranks import run_ranks


def five_bare_blocks():
    return Net(dims=((48, 33), (48, 40), (48, 31), (48, 47), (48, 36)), block=Bare)


def matrix_bytes(model):
    return 4 * sum(p.numel for p in dmuon.get_dedicated_params(model))


# Newton-Schulz ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_newton_schulz_per_matrix_and_step_in_the_whole_job(world_size):
    run_ranks(check_ns_calls, world_size)


def check_ns_calls(rank, world_size):
    run = setup(world_size, make_model=five_bare_blocks)
    scratch = dmuon.report(run.model)["ns_workspace_bytes"]
    run.train(0)
    kept = dmuon.report(run.model)["ns_workspace_bytes"]
    run.train(1)
    run.train(2)
    report = dmuon.report(run.model)
    owned = len(dmuon.get_owned_params(run.model, rank))
    assert report["ns_workspace_bytes"] == kept > scratch
    assert report["ns_calls_last_step"] == owned
    assert report["ns_calls"] == 3 * owned
    assert total(owned) == 10


@pytest.mark.parametrize("world_size", [2, 4])
def test_accumulation_adds_no_newton_schulz_and_no_reduce(world_size):
    run_ranks(check_accumulated_cost, world_size)


def check_accumulated_cost(rank, world_size):
    """Four micro-batches: one NS per matrix, and one reduce among the bytes."""
    run = setup(world_size, make_model=five_bare_blocks)
    run.train(0)
    for part in range(4):
        if part < 3:
            with dmuon.no_sync(run.model):
                run.loss(1, rank, part, 4).backward()
        else:
            run.loss(1, rank, part, 4).backward()
    run.optimizer.step()
    assert total(dmuon.report(run.model)["ns_calls_last_step"]) == 10
    unit = (world_size - 1) * matrix_bytes(run.model)
    assert total(dmuon.report(run.model)["sent_bytes_last_step"]) <= (4 * 2 + 1.1) * unit


# Bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reshard", "bound"), [(True, 3.1), (False, 2.1)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_on_the_wire(world_size, reshard, bound):
    run_ranks(check_bytes, world_size, reshard, bound)


def check_bytes(rank, world_size, reshard, bound):
    """In units of (N-1) P: one reduce, and one or two materialisations; the rest is agreement."""
    run = setup(
        world_size,
        make_model=five_bare_blocks,
        dedicate={"reshard_after_forward": reshard},
        wrap=lambda m, mesh: shard(m, mesh, reshard_after_forward=reshard),
    )
    for step in range(3):
        run.train(step)
        sent = total(dmuon.report(run.model)["sent_bytes_last_step"])
        ratio = sent / ((world_size - 1) * matrix_bytes(run.model))
        assert bound - 1.1 < ratio <= bound, f"step {step}: {ratio:.3f} (N-1)P"


# Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_holds_only_what_it_owns_between_uses(world_size):
    run_ranks(check_memory, world_size)


def check_memory(rank, world_size):
    run = setup(world_size, make_model=five_bare_blocks)
    owned = {p.fqn for p in dmuon.get_owned_params(run.model, rank)}
    assert_little_memory(run, owned)
    three_steps(run)
    assert_little_memory(run, owned)
    with torch.no_grad():
        run.loss(7, rank)
    assert_little_memory(run, owned)


def assert_little_memory(run, owned):
    """Storages are counted, not shapes."""
    names = {p.fqn for p in dmuon.get_dedicated_params(run.model)}
    for name, p in run.model.named_parameters():
        name = clean_name(name)
        if name in names - owned:
            assert p.untyped_storage().nbytes() <= PLACEHOLDER_BYTES, name
            assert p.shape == dedicated(run, name).full_shape, f"{name}: the shape stays true"
            assert p.grad is None or p.grad.untyped_storage().nbytes() <= PLACEHOLDER_BYTES, name
    for p in dmuon.get_owned_params(run.model, run.ranks[0]):
        assert p._owned_data.shape == p.full_shape and p._owned_data.dtype == torch.float32


def dedicated(run, name):
    return next(p for p in dmuon.get_dedicated_params(run.model) if p.fqn == name)


@pytest.mark.parametrize("world_size", [2, 4])
def test_between_uses_a_read_is_loud(world_size):
    run_ranks(check_loud, world_size)


def check_loud(rank, world_size):
    """Shape, dtype and device stay true; the values are NaN."""
    run = setup(world_size)
    three_steps(run)
    for p in dmuon.get_dedicated_params(run.model):
        slot = run.model.get_parameter(p.fqn)
        assert slot.shape == p.full_shape and slot.dtype == torch.float32
        assert slot.requires_grad and slot.is_leaf
        if not p.is_owner:
            assert torch.isnan(slot).all()


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_live_on_owners(world_size):
    run_ranks(check_gradients, world_size)


def check_gradients(rank, world_size):
    """After backward the owner has the mean gradient, whole; the others nothing of that size."""
    run = setup(world_size)
    run.loss(0, rank).backward()
    dmuon.wait_all_reduces(run.model)
    for p in dmuon.get_dedicated_params(run.model):
        grad = run.model.get_parameter(p.fqn).grad
        if p.is_owner:
            assert grad.shape == p.full_shape
            assert grad.dtype == torch.float32 and grad.abs().sum() > 0
        else:
            assert grad is None or grad.untyped_storage().nbytes() <= PLACEHOLDER_BYTES


# What the ranks tell about themselves ------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_inspection_is_json_and_the_same_where_it_should_be(world_size):
    run_ranks(check_inspection, world_size)


def check_inspection(rank, world_size):
    run = setup(world_size)
    three_steps(run)
    for summary in (
        dmuon.report(run.model),
        dmuon.summarize_comm_plan(run.model),
        dmuon.summarize_param_groups(run.model, run.optimizer),
    ):
        assert json.loads(json.dumps(summary)), "empty"
    everyone = [None] * world_size
    listed = [
        (p.fqn, p.owner_rank, tuple(p.full_shape)) for p in dmuon.get_dedicated_params(run.model)
    ]
    torch.distributed.all_gather_object(everyone, listed)
    assert all(other == listed for other in everyone)
    for p in dmuon.get_owned_params(run.model, rank):
        assert p.owner_rank == rank and p.is_owner
        assert p.tp_group is None and p.shard_dim is None
        assert tuple(p._orig_size) == tuple(p.full_shape)
        assert p.numel == run.model.get_parameter(p.fqn).numel()
        assert p.fqn.endswith(p.param_name)


@pytest.mark.parametrize("world_size", [2])
def test_the_mapping_of_owners_keeps_no_weights_alive(world_size):
    run_ranks(check_mapping, world_size)


def check_mapping(rank, world_size):
    model = Net()
    chosen = {n for n, p in model.named_parameters() if in_blocks(n, p)}
    owners = dmuon.dedicate_params(model, cpu_mesh(world_size), predicate=in_blocks)
    assert set(owners) == chosen
    assert set(owners.values()) <= set(range(world_size))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None, "the mapping holds the model"
    assert set(owners) == chosen

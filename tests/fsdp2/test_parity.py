"""Several ranks train exactly as one process."""

from functools import partial

import dmuon
import pytest
import torch

from tests.support.models import Bare, Net, shard
from tests.support.parity import assert_same, check_parity, full_weights, setup, three_steps
from tests.support.ranks import run_ranks

SIZES = [2, 3, 4]


@pytest.mark.parametrize("world_size", SIZES)
def test_one_step(world_size):
    run_ranks(check_one_step, world_size)


def check_one_step(rank, world_size):
    check_parity(rank, world_size, one_step, muon={"weight_decay": 0.1})


def one_step(run):
    run.train(0)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world_size", SIZES)
def test_twenty_steps_in_both_residencies(world_size, reshard):
    run_ranks(check_twenty_steps, world_size, reshard)


def check_twenty_steps(rank, world_size, reshard):
    check_parity(
        rank,
        world_size,
        twenty_steps,
        wrap=partial(shard, reshard_after_forward=reshard),
        dedicate={"reshard_after_forward": reshard},
        muon={"weight_decay": 0.1, "lr": 0.01},
        transient=reshard,
    )


def twenty_steps(run):
    for step in range(20):
        run.train(step)


@pytest.mark.parametrize("world_size", SIZES)
def test_every_keyword_of_the_update(world_size):
    run_ranks(check_keywords, world_size)


def check_keywords(rank, world_size):
    for muon in (
        {"nesterov": False, "momentum": 0.5, "adjust_lr": "original"},
        {"ns_steps": 7, "adjust_lr": "spectral_unclamped", "ns_backend": "direct"},
        {
            "adamw_lr": 1e-2,
            "adamw_betas": (0.8, 0.95),
            "adamw_weight_decay": 0.3,
            "adamw_eps": 1e-6,
            "momentum": 0.0,
            "weight_decay": 0.5,
        },
    ):
        check_parity(rank, world_size, muon=muon)


@pytest.mark.parametrize("world_size", [3, 4])
def test_fewer_matrices_than_ranks(world_size):
    run_ranks(check_fewer_matrices_than_ranks, world_size)


def check_fewer_matrices_than_ranks(rank, world_size):
    run = check_parity(rank, world_size, make_model=one_block)
    owners = {p.owner_rank for p in dmuon.get_dedicated_params(run.model)}
    assert len(owners) == 2, "two matrices, each on a rank of its own"
    check_parity(rank, world_size, predicate=only_the_first_up)


def one_block():
    return Net(dims=((17, 29),))


def only_the_first_up(name, param):
    return name == "blocks.0.up.weight"


@pytest.mark.parametrize("world_size", [2, 4])
def test_more_units_than_owners_and_one_matrix_that_outweighs_the_rest(world_size):
    run_ranks(check_many_units, world_size)


def check_many_units(rank, world_size):
    run = check_parity(rank, world_size, make_model=seven_blocks)
    assert len({p.owner_rank for p in dmuon.get_dedicated_params(run.model)}) == world_size
    run = check_parity(rank, world_size, make_model=one_giant)
    imbalance = dmuon.report(run.model)["load_max_over_mean"]
    assert imbalance >= 1.2 if world_size == 4 else imbalance >= 1.0, imbalance


def seven_blocks():
    return Net(dims=((13, 7),) * 7)


def one_giant():
    return Net(dims=((16, 3), (16, 64), (16, 3)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_sizes_that_do_not_divide_and_vectors_as_matrices(world_size):
    run_ranks(check_sizes, world_size)


def check_sizes(rank, world_size):
    check_parity(rank, world_size, make_model=odd_sizes)


def odd_sizes():
    return Net(dims=((7, 1), (7, 31), (7, 5)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_everything_dedicated_that_can_be(world_size):
    run_ranks(check_everything, world_size)


def check_everything(rank, world_size):
    check_parity(rank, world_size, predicate=every_matrix)


def every_matrix(name, param):
    return param.ndim == 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_publishing_and_packing_change_no_bit(world_size):
    run_ranks(check_bitwise, world_size)


def check_bitwise(rank, world_size):
    reference = weights_of(world_size)
    assert_same(weights_of(world_size), reference)
    assert_same(weights_of(world_size, muon={"replicate_async": False}), reference)
    assert_same(weights_of(world_size, dedicate={"pack_small_params": False}), reference)
    assert_same(weights_of(world_size, dedicate={"process_group_policy": "shared"}), reference)


def weights_of(world_size, **options):
    run = setup(world_size, make_model=seven_blocks, **options)
    three_steps(run)
    return full_weights(run.model)


@pytest.mark.parametrize("world_size", [2, 4])
def test_another_order_of_modules_on_another_rank_changes_no_bit(world_size):
    run_ranks(check_module_order, world_size)


def check_module_order(rank, world_size):
    weights = []
    for backwards in (False, rank % 2 == 1):
        run = setup(world_size, make_model=lambda: bare_blocks(backwards))  # noqa: B023
        three_steps(run)
        weights.append(full_weights(run.model))
    assert_same(weights[1], weights[0])


def bare_blocks(backwards):
    model = Net(dims=((13, 7),) * 3, block=Bare)
    for block in model.blocks if backwards else ():
        block._modules = dict(reversed(block._modules.items()))
    return model


def test_one_rank_is_one_process():
    """A world of one: nothing to send, and the same numbers."""
    run_ranks(check_one_step, 1)


@pytest.mark.parametrize("world_size", [2])
def test_the_torch_generator_is_left_alone(world_size):
    run_ranks(check_generator, world_size)


def check_generator(rank, world_size):
    run = setup(world_size)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    three_steps(run)
    assert torch.equal(torch.get_rng_state(), before), "training drew random numbers"

"""Ranks that hold whole weights train exactly as one process, whoever replicates the rest."""

from functools import partial

from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.support.ddp import BOTH, by_both, check_ddp, replicated, setup_ddp, wrapped
from tests.support.meshes import SQUARE, dp_tp, flat, on, run_on
from tests.support.models import Net
from tests.support.parity import assert_same, full_weights, three_steps
from tests.support.tp_models import MIXED

SIZES = [flat(2), flat(3), flat(4)]


def seven_blocks():
    return Net(dims=((13, 7),) * 7)


def weights_of(layout, **options):
    run = setup_ddp(layout, **options)
    three_steps(run)
    return full_weights(run.model)


# Equal to one process --------------------------------------------------------------------------


@by_both()
@on([flat(1), *SIZES])
def test_three_steps(layout, by):
    run_on(layout, check_three_steps, by)


def check_three_steps(rank, layout, by):
    for options in ({}, {"make_model": seven_blocks, "muon": {"weight_decay": 0.1}}):
        check_ddp(rank, layout, wrap=BOTH[by], **options)


@on([SQUARE, dp_tp(2, 2, "model"), dp_tp(1, 4), dp_tp(4, 1)])
def test_three_steps_with_tensor_parallelism(layout):
    run_on(layout, check_tp)


def check_tp(rank, layout):
    check_ddp(rank, layout, **MIXED)


@on([flat(2), flat(4), SQUARE])
def test_twenty_steps_with_a_scheduler_and_clipping(layout):
    run_on(layout, check_twenty_steps)


def check_twenty_steps(rank, layout):
    model = MIXED if layout.tp_name else {"make_model": Net}
    for wrap in (replicated,) if layout.tp_name else (replicated, wrapped):
        check_ddp(
            rank,
            layout,
            twenty_scheduled_steps,
            wrap=wrap,
            muon={"weight_decay": 0.1, "lr": 0.01},
            **model,
        )


def twenty_scheduled_steps(run):
    """Clips in most steps: the norm falls from above to below the bound."""
    scheduler = CosineAnnealingLR(run.optimizer, T_max=20)
    for step in range(20):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        run.losses.append(run.clip(0.1).item())  # compared like a loss
        run.step()
        scheduler.step()


# Bitwise ---------------------------------------------------------------------------------------


@on(SIZES)
def test_publishing_and_packing_change_no_bit(layout):
    run_on(layout, check_bitwise, "")


@on([SQUARE])
def test_publishing_and_packing_change_no_bit_with_tensor_parallelism(layout):
    run_on(layout, check_bitwise, "tp")


def check_bitwise(rank, layout, kind):
    of = partial(weights_of, layout, **(MIXED if kind else {"make_model": seven_blocks}))
    reference = of(muon={"replicate_async": False})
    assert_same(of(muon={"replicate_async": True}), reference)
    assert_same(of(dedicate={"pack_small_params": False}), reference)
    assert_same(of(dedicate={"process_group_policy": "shared"}), reference)


def test_both_replicators_give_the_same_bits_on_two_ranks():
    """Two summands have one order; each divides by a power of two."""
    run_on(flat(2), check_replicators)


def check_replicators(rank, layout):
    assert_same(weights_of(layout, wrap=wrapped), weights_of(layout, wrap=replicated))


def test_small_buckets_give_the_same_bits():
    run_on(flat(2), check_buckets)


def check_buckets(rank, layout):
    small = partial(replicated, bucket_bytes=64)
    assert_same(weights_of(layout, wrap=small), weights_of(layout))


def test_one_tp_rank_is_no_tp_axis_bit_for_bit():
    run_on(dp_tp(4, 1), check_one_tp_rank)


def check_one_tp_rank(rank, layout):
    without = {key: value for key, value in MIXED.items() if key != "parallelize"}
    assert_same(weights_of(layout, **MIXED), weights_of(flat(4), **without))

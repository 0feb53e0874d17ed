"""Graphs that change: static ones, models called twice, modules frozen and thawed, kept gradients."""

from functools import partial

import pytest

from tests.support.ddp import BOTH, FOR_UNUSED, by_both, check_ddp, wrapped
from tests.support.meshes import SQUARE, flat, on, run_on
from tests.support.models import Net
from tests.support.tp_models import MIXED

# Graphs ----------------------------------------------------------------------------------------


@on([flat(2), flat(4)])
def test_a_static_graph_and_gradients_in_buckets(layout):
    run_on(layout, check_static)


def check_static(rank, layout):
    for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}):
        check_ddp(rank, layout, wrap=partial(wrapped, **options))
        check_ddp(rank, layout, twice, wrap=partial(wrapped, **options))


@by_both()
@on([flat(2), flat(3)])
def test_a_model_called_twice_a_step(layout, by):
    run_on(layout, check_twice, by)


def check_twice(rank, layout, by):
    check_ddp(rank, layout, twice, wrap=BOTH[by])
    if by == "replicate":  # DistributedDataParallel's reducer is made for one backward a forward
        check_ddp(rank, layout, two_backwards)


def twice(run):
    for step in range(3):
        for rank in run.ranks:
            (run.loss(step, rank) + run.loss(step + 10, rank)).backward()
        run.step()


def two_backwards(run):
    for step in range(3):
        for rank in run.ranks:
            losses = [run.loss(step, rank), run.loss(step + 10, rank)]
            for loss in losses:
                loss.backward()
        run.step()


class TwiceInside(Net):
    """Each block runs twice in one forward."""

    def forward(self, x):
        x = self.inp(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


@by_both()
@on([flat(2)])
def test_blocks_called_twice_in_a_forward(layout, by):
    run_on(layout, check_twice_inside, by)


def check_twice_inside(rank, layout, by):
    check_ddp(rank, layout, make_model=TwiceInside, wrap=BOTH[by])


# Frozen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", list(FOR_UNUSED))
@on([flat(2), flat(4)])
def test_modules_frozen_later(layout, by):
    run_on(layout, check_frozen, by)


def check_frozen(rank, layout, by):
    check_ddp(rank, layout, freeze_the_second, wrap=FOR_UNUSED[by], count_ns=False)
    if by == "replicate":  # DistributedDataParallel takes no parameter that becomes trainable
        check_ddp(rank, layout, thaw_the_second, count_ns=False)


def freeze_the_second(run):
    run.train(0)
    run.model.blocks[1].requires_grad_(False)
    for step in range(1, 3):
        run.train(step)
    run.model.blocks[1].requires_grad_(True)


def thaw_the_second(run):
    run.model.blocks[1].requires_grad_(False)
    run.train(0)
    run.model.blocks[1].requires_grad_(True)
    for step in range(1, 3):
        run.train(step)


# Kept gradients --------------------------------------------------------------------------------


@by_both()
@on([flat(2), flat(3)])
def test_gradients_set_to_zero_in_place(layout, by):
    run_on(layout, check_zeroed, by)


def check_zeroed(rank, layout, by):
    check_ddp(rank, layout, zeroed_in_place, wrap=BOTH[by])


def test_gradients_set_to_zero_in_place_with_tensor_parallelism():
    run_on(SQUARE, check_zeroed_tp)


def check_zeroed_tp(rank, layout):
    check_ddp(rank, layout, zeroed_in_place, **MIXED)


def zeroed_in_place(run):
    for step in range(3):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.steps += 1

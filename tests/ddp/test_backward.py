"""What a backward pass may do: accumulate, be clipped, recompute, skip parameters."""

from functools import partial

import dmuon
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp2.test_accumulation import accumulate, clip_each_step, late_backwards, nested
from tests.support.ddp import BOTH, FOR_UNUSED, by_both, check_ddp, setup_ddp, wrapped
from tests.support.meshes import SQUARE, flat, on, run_on
from tests.support.models import Net
from tests.support.parity import assert_same, full_weights, three_steps
from tests.support.tp_models import MIXED, subject

# Accumulation ----------------------------------------------------------------------------------


@by_both()
@on([flat(2), flat(3)])
def test_micro_batches_with_and_without_no_sync(layout, by):
    run_on(layout, check_micro_batches, by)


def check_micro_batches(rank, layout, by):
    for script in (accumulate(no_sync=True), accumulate(no_sync=False), late_backwards, nested):
        check_ddp(rank, layout, script, wrap=BOTH[by])


@on([SQUARE])
def test_micro_batches_with_tensor_parallelism(layout):
    run_on(layout, check_micro_batches_tp)


def check_micro_batches_tp(rank, layout):
    for no_sync in (True, False):
        check_ddp(rank, layout, accumulate(no_sync), **MIXED)


@on([flat(2)])
def test_no_sync_of_torchs_wrapper_is_dmuons(layout):
    run_on(layout, check_no_sync_of_the_wrapper)


def check_no_sync_of_the_wrapper(rank, layout):
    check_ddp(rank, layout, by_the_wrapper, wrap=wrapped)
    by_dmuon, by_torch = (setup_ddp(layout, wrap=wrapped) for _ in range(2))
    by_the_wrapper(by_torch)
    accumulate(no_sync=True)(by_dmuon)
    assert_same(full_weights(by_torch.model), full_weights(by_dmuon.model))


def by_the_wrapper(run):
    if run.managed:
        run.no_sync = run.called.no_sync
    accumulate(no_sync=True)(run)


# Clipping --------------------------------------------------------------------------------------


@on([flat(2), flat(3), flat(4), SQUARE])
def test_clipping_by_the_global_norm(layout):
    run_on(layout, check_clipping)


def check_clipping(rank, layout):
    for norm_type in (2.0, float("inf")):
        check_ddp(rank, layout, clip_each_step(norm_type), **subject(layout))


@by_both()
def test_torchs_clipping_is_dmuons(by):
    run_on(flat(2), check_torch_clipping, by)


def check_torch_clipping(rank, layout, by):
    ours, torchs = (setup_ddp(layout, wrap=BOTH[by]) for _ in range(2))
    for run in (ours, torchs):
        run.loss(0, rank).backward()
    want = dmuon.clip_grad_norm_(ours.optimizer, 0.05)
    got = nn.utils.clip_grad_norm_(torchs.called.parameters(), 0.05)
    assert torch.equal(got, want)
    for run in (ours, torchs):
        run.step()
    assert_same(full_weights(torchs.model), full_weights(ours.model))


# Recomputation ---------------------------------------------------------------------------------


class Recomputed(Net):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@by_both()
@pytest.mark.parametrize("use_reentrant", [True, False])
@on([flat(2), flat(4)])
def test_activation_checkpointing(layout, use_reentrant, by):
    run_on(layout, check_checkpointing, use_reentrant, by)


def check_checkpointing(rank, layout, use_reentrant, by):
    make = partial(Recomputed, use_reentrant)
    for script in (three_steps, accumulate(no_sync=True)):
        check_ddp(rank, layout, script, make_model=make, wrap=BOTH[by])


def test_activation_checkpointing_with_tensor_parallelism():
    run_on(SQUARE, check_checkpointing_tp)


def check_checkpointing_tp(rank, layout):
    for use_reentrant in (True, False):
        check_ddp(rank, layout, prepare=partial(recompute, use_reentrant), **MIXED)


def recompute(use_reentrant, run):
    """Every block of a model under way."""
    for block in run.model.blocks:
        inner = block.forward
        block.forward = partial(checkpoint, inner, use_reentrant=use_reentrant)


# What a loss does not reach --------------------------------------------------------------------


class Routed(Net):
    """Runs the blocks that it is told to; the input layer is always used."""

    path = (0, 1)

    def forward(self, x):
        x = self.inp(x)
        for i in self.path:
            x = self.blocks[i](x)
        return self.head(x)


@pytest.mark.parametrize("by", list(FOR_UNUSED))
@on([flat(2), flat(3)])
def test_parameters_that_some_passes_or_ranks_do_not_use(layout, by):
    run_on(layout, check_unused, by)


def check_unused(rank, layout, by):
    for script in (never_the_second, now_and_then, by_rank):
        check_ddp(rank, layout, script, make_model=Routed, wrap=FOR_UNUSED[by], count_ns=False)


def never_the_second(run):
    run.model.path = (0,)
    three_steps(run)


def now_and_then(run):
    for step in range(4):
        run.model.path = (0, 1) if step % 2 else (0,)
        run.train(step)


def by_rank(run):
    for step in range(3):
        for rank in run.ranks:
            run.model.path = (0,) if (rank + step) % 2 else (1, 0)
            run.loss(step, rank).backward()
        run.step()


def test_what_no_rank_reaches_keeps_its_gradient():
    run_on(flat(2), check_untouched)


def check_untouched(rank, layout):
    run = setup_ddp(layout, make_model=Routed)
    run.model.path = (0,)
    run.loss(0, rank).backward()
    assert all(p.grad is None for p in run.model.blocks[1].parameters())
    assert run.model.blocks[0].up.bias.grad is not None

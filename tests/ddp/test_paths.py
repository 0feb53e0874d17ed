"""Ranks that take other paths, copies of a model, several models in one backward."""

import copy
from functools import partial

import dmuon
import pytest
import torch
import torch.nn.functional as F

from tests.support.ddp import (
    BOTH,
    FOR_UNUSED,
    assert_replicas_equal,
    check_ddp,
    replicated,
    setup_ddp,
    wrapped,
)
from tests.support.meshes import flat, run_on
from tests.support.models import Net, in_blocks
from tests.support.parity import assert_all_raise


class Skipping(Net):
    """Stochastic depth: leaves out the block that `skip` names."""

    skip = None

    def forward(self, x):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = x if i == self.skip else block(x)
        return self.head(x)


def deep():
    return Skipping(dims=((17, 29), (17, 18), (17, 23)))


@pytest.mark.parametrize("by", list(BOTH))
@pytest.mark.parametrize("layout", [flat(2), flat(3)], ids=str)
def test_each_rank_may_skip_another_block(layout, by):
    run_on(layout, check_skipping, by)


def check_skipping(rank, layout, by):
    check_ddp(rank, layout, skipping, wrap=FOR_UNUSED[by], make_model=deep)


def skipping(run):
    for step in range(4):
        for rank in run.ranks:
            run.model.skip = (step + rank) % 3
            run.loss(step, rank).backward()
        run.step()


@pytest.mark.parametrize("by", list(BOTH))
def test_a_copy_is_a_module_like_any_other(by):
    run_on(flat(2), check_copy, by)


def check_copy(rank, layout, by):
    run = setup_ddp(layout, wrap=BOTH[by])
    run.train(0)
    dmuon.wait_all_replicate_broadcasts(run.model)
    x, _ = run.batch(1, rank)
    averaged = torch.optim.swa_utils.AveragedModel(run.model)
    twin = copy.deepcopy(run.model)
    with torch.no_grad():
        want = run.model(x)
        assert torch.equal(twin(x), want) and torch.equal(averaged(x), want)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), run.model.parameters()))
    twin.load_state_dict(twin.state_dict())
    F.mse_loss(twin(x), torch.zeros(len(x), 20)).backward()
    assert all(p.grad is not None for p in twin.parameters())
    run.train(1)
    assert_replicas_equal(run)


def test_two_models_in_one_backward():
    run_on(flat(2), check_joint)


def check_joint(rank, layout):
    """A loss over both reaches both; each trains as it does alone."""
    first, second = (setup_ddp(layout, wrap=replicated) for _ in range(2))
    alone = setup_ddp(layout, wrap=replicated)
    for step in range(3):
        (first.loss(step, rank) + second.loss(step, rank)).backward()
        first.step()
        second.step()
        alone.train(step)
    for run in (first, second):
        assert_replicas_equal(run)
        for p, q in zip(run.model.parameters(), alone.model.parameters()):
            assert torch.equal(p, q)


def test_a_forward_under_torchs_no_sync_is_not_averaged_as_torch_has_it():
    run_on(flat(2), check_forward_inside)


def check_forward_inside(rank, layout):
    run = setup_ddp(layout, wrap=partial(wrapped))
    with run.called.no_sync():
        loss = run.loss(0, rank)
    loss.backward()
    with pytest.raises(ValueError, match="never reduced"):
        run.optimizer.step()
    run.optimizer.zero_grad()
    run.train(1)
    assert_replicas_equal(run)


def test_ranks_that_replicate_other_models():
    run_on(flat(2), check_other_models)


def check_other_models(rank, layout):
    """An extra layer, another shape, a frozen weight, other buckets: one text on all ranks."""
    mesh = layout.mesh()

    def refused(change, word, **options):
        model = Net()
        change(model)
        dmuon.dedicate_params_ddp(model, mesh, predicate=in_blocks)
        assert_all_raise(lambda: replicated(model, mesh, **options), "ValueError", word)

    def extra(model):
        if rank:
            model.extra = torch.nn.Linear(3, 3)

    def shape(model):
        model.head = torch.nn.Linear(17, 20 + rank)

    refused(extra, "extra.weight")
    refused(shape, "head.weight")
    refused(lambda model: model.head.weight.requires_grad_(rank == 0), "requires_grad")
    refused(lambda model: None, "bucket_bytes", bucket_bytes=100 + rank)


def test_schedulers_that_cycle_momentum():
    run_on(flat(2), check_cycling)


def check_cycling(rank, layout):
    run = setup_ddp(layout)
    schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, [0.02, 1e-3], total_steps=5)
    momenta = set()
    for step in range(4):
        run.train(step)
        momenta.add(run.optimizer.param_groups[0]["momentum"])
        schedule.step()
    assert len(momenta) > 1
    assert_replicas_equal(run)

"""Manual control: every call is idempotent and legal at any point of a step."""

import dmuon
import pytest
import torch

from tests.support.parity import assert_same, check_parity, full_weights, setup, three_steps
from tests.support.ranks import run_ranks

CALLS = [
    "wait_all_reduces",
    "prepare_muon_grads",
    "broadcast_all_updates",
    "broadcast_all_updates_async",
    "wait_all_replicate_broadcasts",
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_call_at_every_moment_changes_nothing(world_size):
    run_ranks(check_calls, world_size)


def check_calls(rank, world_size):
    reference = setup(world_size)
    three_steps(reference)
    run = setup(world_size)
    everything(run)
    for step in range(3):
        loss = run.loss(step, rank)
        everything(run)
        loss.backward()
        everything(run)
        run.optimizer.step()
        everything(run)
        run.optimizer.zero_grad()
        everything(run)
    assert_same(full_weights(run.model), full_weights(reference.model))


def everything(run):
    for name in CALLS:
        getattr(dmuon, name)(run.model)
        getattr(dmuon, name)(run.model)


@pytest.mark.parametrize("world_size", [2])
def test_gradients_edited_between_backward_and_step_are_used(world_size):
    run_ranks(check_edited, world_size)


def check_edited(rank, world_size):
    """Scaling every gradient by hand, as some training scripts do, reaches the update."""
    check_parity(rank, world_size, edited)


def edited(run):
    for step in range(3):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        elsewhere = set()
        if run.managed:
            dmuon.wait_all_reduces(run.model)
            elsewhere = {p.fqn for p in dmuon.get_dedicated_params(run.model) if not p.is_owner}
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                if name not in elsewhere:
                    p.grad.mul_(0.5 if step else 3.0)
        run.step()

"""Evaluation, zero_grad, freezing, unused parameters: legal at any moment of a step."""

import warnings

import dmuon
import pytest
import torch

from tests.support.models import Bare, Net, shard
from tests.support.parity import assert_same, check_parity, full_weights, setup
from tests.support.ranks import run_ranks

# Evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_evaluation_at_any_moment(world_size, reshard):
    run_ranks(check_evaluation, world_size, reshard)


def check_evaluation(rank, world_size, reshard):
    """Blocks of matrices only: FSDP2 alone keeps stale weights without resharding."""
    check_parity(
        rank,
        world_size,
        evaluate_everywhere,
        make_model=lambda: Net(block=Bare),
        dedicate={"reshard_after_forward": reshard},
        wrap=lambda m, mesh: shard(m, mesh, reshard_after_forward=True),
        transient=reshard,
    )


def evaluate_everywhere(run):
    evaluate(run, torch.no_grad)
    evaluate(run, torch.no_grad)
    for step in range(3):
        for rank in run.ranks:
            evaluate(run, torch.no_grad, [rank])
            loss = run.loss(step, rank)
            evaluate(run, torch.no_grad, [rank])
            loss.backward()
        evaluate(run, torch.no_grad)
        run.optimizer.step()
        evaluate(run, torch.no_grad)
        run.optimizer.zero_grad()
        run.steps += 1
    evaluate(run, torch.enable_grad)  # a forward whose graph is thrown away
    run.train(3)


def evaluate(run, mode, ranks=None):
    """In eval mode, on a batch of its own; the loss is compared like any other."""
    run.model.eval()
    with mode():
        for rank in ranks or run.ranks:
            run.loss(99, rank)
    run.model.train()


@pytest.mark.parametrize("world_size", [2])
def test_inference_mode_between_steps(world_size):
    run_ranks(check_inference_mode, world_size)


def check_inference_mode(rank, world_size):
    """From the second step on: FSDP2's own lazy setup must not happen in inference mode."""
    check_parity(rank, world_size, inference_between_steps)


def inference_between_steps(run):
    for step in range(3):
        run.train(step)
        evaluate(run, torch.inference_mode)


@pytest.mark.parametrize("world_size", [2])
def test_evaluation_sees_the_update_at_once(world_size):
    run_ranks(check_fresh_weights, world_size)


def check_fresh_weights(rank, world_size):
    for asynchronous in (True, False):
        run = setup(world_size, muon={"lr": 0.5, "replicate_async": asynchronous})
        x, _ = run.batch(0, rank)
        before = run.model(x).detach()
        run.train(0)
        with torch.no_grad():
            after = run.model(x)
        plain = Net()
        plain.load_state_dict(full_weights(run.model))
        torch.testing.assert_close(after, plain(x).detach(), rtol=1e-5, atol=1e-6)
        assert (after - before).abs().max() > 1e-2, "the step changed nothing"


# zero_grad -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("by", ["optimizer", "model"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_at_any_moment(world_size, by, to_none):
    run_ranks(check_zero_grad, world_size, by, to_none)


def check_zero_grad(rank, world_size, by, to_none):
    check_parity(rank, world_size, zero_grad_everywhere(by, to_none))


def zero_grad_everywhere(by, to_none):
    def clear(run):
        getattr(run, by).zero_grad(set_to_none=to_none)

    def script(run):
        clear(run)
        for step in range(3):
            for rank in run.ranks:
                run.loss(50 + step, rank).backward()
            clear(run)  # discards the gradients above
            for rank in run.ranks:
                loss = run.loss(step, rank)
                if run.managed:  # the oracle still holds the gradients of the ranks before
                    clear(run)
                loss.backward()
            run.optimizer.step()
            run.steps += 1
            clear(run)
            clear(run)

    return script


@pytest.mark.parametrize("world_size", [2])
def test_zero_grad_between_backward_and_step_makes_the_step_do_nothing(world_size):
    run_ranks(check_cleared_step, world_size)


def check_cleared_step(rank, world_size):
    run = setup(world_size, muon={"weight_decay": 0.5})
    run.train(0)
    before = full_weights(run.model)
    for clear in (run.optimizer.zero_grad, run.model.zero_grad):
        run.loss(1, rank).backward()
        clear()
        run.optimizer.step()
        assert_same(full_weights(run.model), before)


# Steps without gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_without_backward_changes_nothing(world_size):
    run_ranks(check_idle_steps, world_size)


def check_idle_steps(rank, world_size):
    """F32 and F33: no gradient, no change, no decay; and a second step after a real one."""
    run = setup(world_size, muon={"weight_decay": 0.5})
    start = full_weights(run.model)
    run.optimizer.step()
    assert_same(full_weights(run.model), start)
    run.train(0)
    after = full_weights(run.model)
    assert not torch.equal(after["blocks.0.up.weight"], start["blocks.0.up.weight"])
    run.optimizer.step()
    run.optimizer.step()
    assert_same(full_weights(run.model), after)
    assert dmuon.report(run.model)["ns_calls_last_step"] == 0


@pytest.mark.parametrize("world_size", [2])
def test_a_first_step_that_never_saw_a_gradient_warns_once(world_size):
    run_ranks(check_warns_once, world_size)


def check_warns_once(rank, world_size):
    run = setup(world_size)
    with pytest.warns(UserWarning, match="gradient"):
        run.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.optimizer.step()
        run.train(0)
        run.optimizer.step()


@pytest.mark.parametrize("world_size", [2])
def test_steps_without_backward_between_real_ones(world_size):
    run_ranks(check_interleaved_idle_steps, world_size)


def check_interleaved_idle_steps(rank, world_size):
    check_parity(rank, world_size, interleaved_idle_steps)


def interleaved_idle_steps(run):
    run.optimizer.step()
    for step in range(3):
        run.train(step)
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("world_size", [2])
def test_step_twice_on_one_gradient_is_what_torch_does(world_size):
    run_ranks(check_step_twice, world_size)


def check_step_twice(rank, world_size):
    check_parity(rank, world_size, step_twice)


def step_twice(run):
    for step in range(2):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        run.optimizer.step()
        run.step()


# Frozen and unused -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_then_unfrozen(world_size):
    run_ranks(check_frozen, world_size)


def check_frozen(rank, world_size):
    check_parity(rank, world_size, toggled_each_step)
    check_parity(rank, world_size, three_then_thawed, prepare=freeze_first_block)


def matrices_of_block(run, i):
    block = run.model.blocks[i]
    return [block.up.weight, block.down.weight]


def set_frozen(run, i, frozen):
    for p in matrices_of_block(run, i):
        p.requires_grad_(not frozen)


def freeze_first_block(run):
    set_frozen(run, 0, True)


def three_then_thawed(run):
    for step in range(2):
        run.train(step)
    set_frozen(run, 0, False)
    for step in range(2, 4):
        run.train(step)


def toggled_each_step(run):
    for step in range(4):
        set_frozen(run, 0, step % 2 == 1)
        run.train(step)


@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_before_setup(world_size):
    run_ranks(check_frozen_before_setup, world_size)


def check_frozen_before_setup(rank, world_size):
    check_parity(rank, world_size, three_then_thawed, make_model=frozen_net)


def frozen_net():
    model = Net()
    for p in (model.blocks[0].up.weight, model.blocks[0].down.weight):
        p.requires_grad_(False)
    return model


class SkipsBlocks(Net):
    """Leaves out the blocks in `skip`, though it computes them, as a routed model would."""

    skip = ()

    def forward(self, x):
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            y = block(x)
            x = x if i in self.skip else y
        return self.head(x)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unused_on_some_ranks(world_size):
    run_ranks(check_unused_on_some, world_size)


def check_unused_on_some(rank, world_size):
    for rank_that_skips in range(0, world_size, 2):
        check_parity(rank, world_size, skip_on(rank_that_skips), make_model=skips_blocks)


def skips_blocks():
    return SkipsBlocks(dims=((17, 29), (17, 18), (17, 5)), block=Bare)


def skip_on(rank_that_skips):
    def script(run):
        for step in range(3):
            for rank in run.ranks:
                run.model.skip = (1,) if rank == rank_that_skips else ()
                run.loss(step, rank).backward()
            run.step()

    return script


class SometimesSpare(torch.nn.Module):
    """One matrix of the unit is used only where `spares` says so."""

    spares = True

    def __init__(self, dim, hidden):
        super().__init__()
        self.up = torch.nn.Linear(dim, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, dim, bias=False)
        self.spare = torch.nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        y = x + self.down(torch.tanh(self.up(x)))
        return self.spare(y) if SometimesSpare.spares else y


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_matrix_of_a_unit_unused_on_some_ranks(world_size):
    run_ranks(check_matrix_unused_on_some, world_size)


def check_matrix_unused_on_some(rank, world_size):
    for last_user in range(world_size - 1):
        check_parity(
            rank, world_size, spare_up_to(last_user), make_model=lambda: Net(block=SometimesSpare)
        )


def spare_up_to(last_user):
    def script(run):
        for step in range(3):
            for rank in run.ranks:
                SometimesSpare.spares = rank <= last_user or step == 1
                run.loss(step, rank).backward()
            run.step()
        SometimesSpare.spares = True

    return script


@pytest.mark.parametrize("world_size", [2, 4])
def test_unused_on_all_ranks(world_size):
    run_ranks(check_unused_everywhere, world_size)


def check_unused_everywhere(rank, world_size):
    """Skipped like a parameter without gradient in torch: no decay, no momentum, no NS."""
    check_parity(
        rank, world_size, skip_everywhere, make_model=skips_blocks, muon={"weight_decay": 0.3}
    )


def skip_everywhere(run):
    for step, skip in enumerate([(1,), (), (0, 2), ()]):
        run.model.skip = skip
        run.train(step)


class NeverCalls(Net):
    """The middle block is not even called."""

    def forward(self, x):
        return self.head(self.blocks[2](self.blocks[0](self.inp(x))))


@pytest.mark.parametrize("world_size", [2])
def test_a_block_that_is_never_called(world_size):
    run_ranks(check_never_called, world_size)


def check_never_called(rank, world_size):
    check_parity(
        rank, world_size, make_model=lambda: NeverCalls(((17, 29), (17, 18), (17, 5)), Bare)
    )


class HalfUsed(torch.nn.Module):
    """One of the two matrices of the unit takes no part."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.up = torch.nn.Linear(dim, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, dim, bias=False)
        self.spare = torch.nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_matrix_of_a_unit_that_is_unused(world_size):
    run_ranks(check_half_used, world_size)


def check_half_used(rank, world_size):
    check_parity(
        rank, world_size, make_model=lambda: Net(block=HalfUsed), muon={"weight_decay": 0.3}
    )

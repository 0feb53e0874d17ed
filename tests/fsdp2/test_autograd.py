"""Whatever autograd may do with a unit between two steps comes out as on one process."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from tests.support.models import Bare, Block, Net
from tests.support.parity import check_parity
from tests.support.ranks import run_ranks

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def once_per_rank(*checks, sizes=(2, 4)):
    return pytest.mark.parametrize(
        ("check", "world_size"),
        [(c, n) for c in checks for n in sizes],
        ids=[f"{c.__name__.removeprefix('check_')}-{n}" for c in checks for n in sizes],
    )


# Calls and backward passes ---------------------------------------------------------------------


def check_module_called_twice_in_one_forward(rank, world_size):
    check_parity(rank, world_size, make_model=CallsItsBlocksTwice)


class CallsItsBlocksTwice(Net):
    def forward(self, x):
        x = self.inp(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


def check_linear_used_twice_in_one_block(rank, world_size):
    check_parity(rank, world_size, make_model=lambda: Net(block=Squared))


class Squared(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) + self.down(torch.sigmoid(self.up(x)))


def check_two_forwards_before_one_backward(rank, world_size):
    check_parity(rank, world_size, two_forwards)


def two_forwards(run):
    for step in range(3):
        for rank in run.ranks:
            first, second = (run.loss(10 * step + i, rank) for i in range(2))
            (first + 0.5 * second).backward()
        run.step()


def check_two_forwards_then_two_backwards(rank, world_size):
    check_parity(rank, world_size, two_forwards_two_backwards)


def two_forwards_two_backwards(run):
    for step in range(3):
        for rank in run.ranks:
            losses = [run.loss(10 * step + i, rank) for i in range(2)]
            for loss in losses[:: 1 - 2 * (step % 2)]:  # the second one first, every other step
                loss.backward()
        run.step()


def check_backward_twice_through_one_graph(rank, world_size):
    check_parity(rank, world_size, retained_graph)


def retained_graph(run):
    for step in range(3):
        for rank in run.ranks:
            loss = run.loss(step, rank)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
        run.step()


def check_two_losses_of_one_forward(rank, world_size):
    check_parity(rank, world_size, two_losses)


def two_losses(run):
    for step in range(3):
        for rank in run.ranks:
            x, y = run.batch(step, rank)
            out = run.model(x)
            (run.scale * F.mse_loss(out, y)).backward(retain_graph=True)
            (run.scale * F.l1_loss(out, y)).backward()
        run.step()


def check_gradient_with_respect_to_the_input_only(rank, world_size):
    check_parity(rank, world_size, input_gradient_first)


def input_gradient_first(run):
    for step in range(3):
        for rank in run.ranks:
            x, _ = run.batch(step, rank)
            x.requires_grad_()
            (g,) = torch.autograd.grad(run.model(x).square().sum(), [x])
            assert torch.isfinite(g).all() and g.abs().sum() > 0
            run.loss(step, rank).backward()
        run.step()


def check_input_that_requires_grad(rank, world_size):
    check_parity(rank, world_size, trained_input)


def trained_input(run):
    for step in range(3):
        for rank in run.ranks:
            x, y = run.batch(step, rank)
            x.requires_grad_()
            (run.scale * F.mse_loss(run.model(x), y)).backward()
            assert x.grad is not None and torch.isfinite(x.grad).all()
        run.step()


@once_per_rank(
    check_module_called_twice_in_one_forward,
    check_linear_used_twice_in_one_block,
    check_two_forwards_before_one_backward,
    check_two_forwards_then_two_backwards,
    check_backward_twice_through_one_graph,
    check_two_losses_of_one_forward,
    check_gradient_with_respect_to_the_input_only,
    check_input_that_requires_grad,
)
def test_calls_and_passes(check, world_size):
    run_ranks(check, world_size)


# Activation checkpointing ----------------------------------------------------------------------


class InnerCheckpoint(Block):
    """Checkpoints a part of itself."""

    reentrant = False

    def forward(self, x):
        return x + checkpoint(self.inside, x, use_reentrant=self.reentrant)

    def inside(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class InnerReentrant(InnerCheckpoint):
    reentrant = True


class OuterCheckpoint(Net):
    """Checkpoints each block as a whole."""

    reentrant = False

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class OuterReentrant(OuterCheckpoint):
    reentrant = True


class SharedByTwoSegments(OuterCheckpoint):
    """Two segments run the same blocks, so their gradients arrive in two parts."""

    def forward(self, x):
        x = self.inp(x)
        for _ in range(2):
            x = checkpoint(self.all_blocks, x, use_reentrant=self.reentrant)
        return self.head(x)

    def all_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class SharedByTwoReentrantSegments(SharedByTwoSegments):
    reentrant = True


def wrapped_blocks():
    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


CHECKPOINTED = {
    "inner": lambda: Net(block=InnerCheckpoint),
    "inner_reentrant": lambda: Net(block=InnerReentrant),
    "outer": OuterCheckpoint,
    "outer_reentrant": OuterReentrant,
    "nested": lambda: OuterCheckpoint(block=InnerCheckpoint),
    "nested_reentrant": lambda: OuterReentrant(block=InnerReentrant),
    "nested_mixed": lambda: OuterReentrant(block=InnerCheckpoint),
    "shared": SharedByTwoSegments,
    "shared_reentrant": lambda: SharedByTwoReentrantSegments(block=Bare),  # FSDP2 alone fails
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", list(CHECKPOINTED))
def test_activation_checkpointing(kind, world_size):
    run_ranks(check_checkpointing, world_size, kind)


def check_checkpointing(rank, world_size, kind):
    check_parity(rank, world_size, two_steps, make_model=CHECKPOINTED[kind])


def two_steps(run):
    for step in range(2):
        run.train(step)


@pytest.mark.parametrize("world_size", [2])
def test_checkpoint_wrapper_changes_no_name(world_size):
    run_ranks(check_checkpoint_wrapper, world_size)


def check_checkpoint_wrapper(rank, world_size):
    """The wrapper hides its prefix from named_parameters(); the oracle sees the same names."""
    check_parity(rank, world_size, two_steps, make_model=wrapped_blocks)


# What a block returns, and what is done to it --------------------------------------------------


@dataclass
class Output:
    hidden: torch.Tensor
    aux: dict


class InDict(Block):
    def forward(self, x):
        return {"out": [super().forward(x), None], "aux": 3}


class InDataclass(Block):
    def forward(self, x):
        y = super().forward(x)
        return Output(y, {"y": (y * 0.5,)})


class TakesStructures(Net):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            out = block(x)
            x = out["out"][0] if isinstance(out, dict) else out.hidden + out.aux["y"][0]
        return self.head(x)


class ChangesInPlace(Net):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            x += 1
            x.mul_(0.5)
        return self.head(x)


class GivesView(Bare):
    """Bare: FSDP2's own backward hook is lost when a view is changed in place."""

    def forward(self, x):
        return super().forward(x).view(-1, x.shape[-1])


class OnlyASlice(Net):
    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            y = block(x)
            y[:, :3].mul_(2.0)
            x = torch.cat([y[:, :5], x[:, 5:]], dim=1)
        return self.head(x)


class ReadsWeightViews(Block):
    """Uses parts of the matrices, not the modules that hold them."""

    def forward(self, x):
        up, down = self.up.weight[:5], self.down.weight.t()[:5]
        return x + torch.tanh(self.norm(x) @ up.T) @ down


STRUCTURES = {
    "dict": lambda: TakesStructures(block=InDict),
    "dataclass": lambda: TakesStructures(block=InDataclass),
    "in_place": ChangesInPlace,
    "in_place_on_view": lambda: ChangesInPlace(block=GivesView),
    "slice": OnlyASlice,
    "weight_views": lambda: Net(block=ReadsWeightViews),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", list(STRUCTURES))
def test_outputs_of_every_kind(kind, world_size):
    if kind == "dataclass" and TORCH < (2, 15):
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not look into dataclasses")
    run_ranks(check_structure, world_size, kind)


def check_structure(rank, world_size, kind):
    check_parity(rank, world_size, two_steps, make_model=STRUCTURES[kind])


# Exceptions ------------------------------------------------------------------------------------


class Refuses(nn.Module):
    """Passes its input on, or raises in forward or in backward when told to."""

    when = None

    def __init__(self, dim, hidden):
        super().__init__()
        self.inner = Block(dim, hidden)

    def forward(self, x):
        x = self.inner(x)
        if Refuses.when == "forward":
            raise RuntimeError("refused in forward")
        if Refuses.when == "backward":
            x.register_hook(refuse)
        return x


def refuse(grad):
    raise RuntimeError("refused in backward")


def check_exception_on_all_ranks(rank, world_size, when):
    check_parity(rank, world_size, fail_in_between(when), make_model=lambda: Net(block=Refuses))


def fail_in_between(when):
    def script(run):
        run.train(0)
        for rank in run.ranks:
            Refuses.when = when
            with pytest.raises(RuntimeError, match="refused in"):
                run.loss(1, rank).backward()
            Refuses.when = None
        run.optimizer.zero_grad()
        if run.managed:
            reset_iteration(run.model)
        for step in (2, 3):
            run.train(step)

    return script


def reset_iteration(model):
    """FSDP2's own state does not return to idle by itself; this public method exists for it."""
    getattr(model, "reset_iter_state", lambda: None)()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_then_a_normal_step(when, world_size):
    if when == "backward" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not recover from it")
    run_ranks(check_exception_on_all_ranks, world_size, when)

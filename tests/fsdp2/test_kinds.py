"""Weights of every kind: experts, convolutions, tied, bf16 compute, meta construction."""

import copy
from typing import ClassVar

import dmuon
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.models import INPUTS, Bare, Block, Net, in_blocks, shard
from tests.support.oracle import Oracle, relative_error, tolerance
from tests.support.parity import (
    Run,
    check_parity,
    clean_weights,
    cpu_mesh,
    full_weights,
    owned_weights,
    three_steps,
)
from tests.support.ranks import run_ranks

# More than two dims ----------------------------------------------------------------------------


class Experts(nn.Module):
    """Three stacked matrices, mixed by a softmax."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, hidden, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(3, dim, hidden) / hidden**0.5)

    def forward(self, x):
        hidden = torch.tanh(torch.einsum("bd,ehd->ebh", x, self.up))
        return x + torch.einsum("ebh,edh->bd", hidden, self.down) / 3


class Conv(nn.Module):
    """A convolution over the features, as a stack of channels."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.conv = nn.Conv2d(1, hidden, (1, 3), padding=(0, 1), bias=False)
        self.back = nn.Conv2d(hidden, 1, (1, 3), padding=(0, 1), bias=False)

    def forward(self, x):
        y = torch.tanh(self.conv(x[:, None, None, :]))
        return x + self.back(y)[:, 0, 0, :]


class Conv1d(Conv):
    def __init__(self, dim, hidden):
        nn.Module.__init__(self)
        self.conv = nn.Conv1d(1, hidden, 3, padding=1, bias=False)
        self.back = nn.Conv1d(hidden, 1, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.back(torch.tanh(self.conv(x[:, None, :])))[:, 0, :]


def viewed(view):
    return {"overrides": [{"name": "blocks", "set": {"view": view}}]}


@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_and_convolutions_by_their_views(world_size):
    run_ranks(check_views, world_size)


def check_views(rank, world_size):
    for block, view in ((Experts, None), (Experts, "flatten"), (Conv, None)):
        names = dict(Net(block=block).named_parameters())
        check_parity(
            rank,
            world_size,
            make_model=lambda: Net(block=block),  # noqa: B023
            dedicate={"param_policy": viewed(view)} if view else {},
            oracle={"views": dict.fromkeys(names, view)} if view else {},
            count_ns=False,
        )


@pytest.mark.parametrize("world_size", [2])
def test_a_one_dimensional_convolution_is_flattened(world_size):
    run_ranks(check_conv1d, world_size)


def check_conv1d(rank, world_size):
    """Three dims, but a convolution: rows are its output channels."""
    names = [n for n, _ in Net(block=Conv1d).named_parameters()]
    check_parity(
        rank,
        world_size,
        make_model=lambda: Net(block=Conv1d),
        count_ns=False,
        oracle={"views": dict.fromkeys(names, "flatten")},
    )


# Routes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_routes_of_adamw(world_size):
    run_ranks(check_adamw_routes, world_size)


def check_adamw_routes(rank, world_size):
    """Trained by AdamW either way: sharded by FSDP2, or whole on its owner."""
    for route in ("sharded_adamw", "adamw"):
        check_parity(
            rank, world_size, dedicate={"param_policy": policy(route)}, muon_names=first_block
        )


def policy(route):
    return {"overrides": [{"name": "blocks.1", "set": {"route": route}}]}


def first_block(name, param):
    return in_blocks(name, param) and "blocks.0" in name


# Tied ------------------------------------------------------------------------------------------


class TiedBlock(Block):
    """`down` is the very tensor of `up`: one matrix, used twice, under two names."""

    def __init__(self, dim, hidden):
        super().__init__(dim, dim)
        self.down.weight = self.up.weight


class TiedAcrossBlocks(Net):
    def __init__(self):
        super().__init__(dims=((17, 29), (17, 29)))
        self.blocks[1].up.weight = self.blocks[0].up.weight


@pytest.mark.parametrize("world_size", [2, 4])
def test_tied_weights_in_one_unit(world_size):
    run_ranks(check_tied_in_one_unit, world_size)


def check_tied_in_one_unit(rank, world_size):
    run = check_parity(rank, world_size, make_model=lambda: Net(block=TiedBlock))
    for block in run.model.blocks:
        assert block.down.weight is block.up.weight, "the tie was cut"


@pytest.mark.parametrize("world_size", [2])
def test_tied_weights_of_two_units_are_equal_to_one_process_or_refused_by_name(world_size):
    run_ranks(check_tied_across, world_size)


def check_tied_across(rank, world_size):
    try:
        check_parity(rank, world_size, make_model=TiedAcrossBlocks)
    except ValueError as error:
        assert "blocks.0.up.weight" in str(error) and "blocks.1.up.weight" in str(error)


# bf16 compute ----------------------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class InBf16(nn.Module):
    """What the policy does, on one process: fp32 master weights, cast at each use."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        weights = {n: p.to(torch.bfloat16) for n, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, x.to(torch.bfloat16))


@pytest.mark.parametrize("world_size", [2, 4])
def test_bf16_compute_keeps_an_fp32_master(world_size):
    run_ranks(check_bf16, world_size)


def check_bf16(rank, world_size):
    """One step to fp32 accuracy; after five at most twice as far from fp32 as one process is."""
    for steps in (1, 5):
        torch.manual_seed(7)
        plain = Net()
        model, mesh = copy.deepcopy(plain), cpu_mesh(world_size)
        dmuon.dedicate_params(model, mesh, predicate=in_blocks)
        shard(model, mesh, mp_policy=BF16)
        run = Run(model, dmuon.Muon(model), [rank], world_size, managed=True)
        train_steps(run, steps)
        weights = full_weights(model)
        masters = owned_weights(model)
        assert {w.dtype for w in masters.values()} == {torch.float32}
        if rank == 0:
            compare_bf16(weights, plain, world_size, steps)


def train_steps(run, steps):
    for step in range(steps):
        for rank in run.ranks:
            x, y = run.batch(step, rank)
            (run.scale * F.mse_loss(run.model(x).float(), y)).backward()
        run.step()


def compare_bf16(weights, plain, world_size, steps):
    chosen = {n for n, p in plain.named_parameters() if in_blocks(n, p)}
    low, high = InBf16(copy.deepcopy(plain)), copy.deepcopy(plain)
    for model, names in ((low, {f"net.{n}" for n in chosen}), (high, chosen)):
        run = Run(model, Oracle(model, names), list(range(world_size)), world_size, managed=False)
        train_steps(run, steps)
    for name, p in low.net.named_parameters():
        error = relative_error(weights[name], p)
        cost_of_bf16 = relative_error(high.get_parameter(name), p)
        allowed = 2 * tolerance(1) if steps == 1 else 2 * cost_of_bf16
        assert error <= allowed, f"{name} after {steps}: {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("world_size", [2])
def test_forward_runs_in_the_dtype_of_the_policy(world_size):
    run_ranks(check_forward_dtype, world_size)


class NotesDtype(Bare):
    seen: ClassVar[set] = set()

    def forward(self, x):
        NotesDtype.seen |= {self.up.weight.dtype, self.down.weight.dtype, x.dtype}
        return super().forward(x)


def check_forward_dtype(rank, world_size):
    NotesDtype.seen = set()
    model, mesh = Net(block=NotesDtype), cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    shard(model, mesh, mp_policy=BF16)
    run = Run(model, dmuon.Muon(model), [rank], world_size, managed=True)
    train_steps(run, 1)
    assert NotesDtype.seen == {torch.bfloat16}


# Meta construction -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_meta_construction_then_to_empty(world_size):
    run_ranks(check_meta, world_size)


def check_meta(rank, world_size):
    """Shapes first, values later: afterwards training goes on as with any other values."""
    with torch.device("meta"):
        model = Net()
    mesh = cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    shard(model, mesh)
    model.to_empty(device="cpu")
    initialise(model)
    optimizer = dmuon.Muon(model)
    run = Run(model, optimizer, [rank], world_size, managed=True)
    start = full_weights(model)
    plain = Net()
    plain.load_state_dict(start)
    for name, w in start.items():
        assert torch.isfinite(w).all(), f"{name} was not initialised"
        assert w.ndim == 1 or w.std() > 0, f"{name} is constant"
    chosen = {n for n, p in plain.named_parameters() if in_blocks(n, p)}
    three_steps(run)
    got = full_weights(model)
    reference = Run(plain, Oracle(plain, chosen), list(range(world_size)), world_size, False)
    three_steps(reference)
    for name, w in clean_weights(plain).items():
        assert relative_error(got[name], w) <= 2 * tolerance(3), name


def test_values_that_are_set_before_dmuon_muon():
    run_ranks(check_set_first, 2)


def check_set_first(rank, world_size):
    """The dtype in which a unit computes is known at the first forward, whatever came before."""
    values = Net().state_dict()
    with torch.device("meta"):
        model = Net()
    mesh = cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    dmuon.set_model_state_dict(model, values)
    computed = []
    model.blocks[0].up.register_forward_hook(
        lambda module, *_: computed.append(module.weight.dtype)
    )
    assert model(torch.randn(3, INPUTS)).dtype == torch.bfloat16
    assert computed == [torch.bfloat16]
    for name, w in dmuon.get_model_state_dict(model, rank0_only=False).items():
        assert torch.equal(w, values[name]), name


def initialise(model):
    """As training scripts do: every module initialises itself, on every rank."""
    torch.manual_seed(11)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


# A matrix that no fully_shard encloses, and the reverse ------------------------------------------


@pytest.mark.parametrize("world_size", [2])
def test_blocks_that_are_not_sharded_by_themselves(world_size):
    run_ranks(check_root_only, world_size)


def check_root_only(rank, world_size):
    check_parity(rank, world_size, wrap=lambda m, mesh: fully_shard(m, mesh=mesh))

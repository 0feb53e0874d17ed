"""Models as people write them: built under zero.Init, recomputed, shared, half used, frozen."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import INPUTS, OUTPUTS, Bare, Block, Net
from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, check_zero, deepspeed_ready, make_engine

by_stage = pytest.mark.parametrize("stage", STAGES)
BF16 = {"bf16": {"enabled": True}}


def rounded_net():
    """Whose values bfloat16 holds: zero.Init keeps no others."""
    return Net().bfloat16().float()


def built_in_parts(config, plain):
    """Every parameter partitioned as soon as it is made; then the values of `plain`."""
    deepspeed = deepspeed_ready()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Net()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            for p, value in zip(model.parameters(), plain.parameters(), strict=True):
                p.data.copy_(value)
    return make_engine(config, model)


def test_models_built_under_zero_init():
    run_ranks(check_models_built_under_zero_init, 2, limit_s=90)


def check_models_built_under_zero_init(rank, world_size):
    check_zero(rank, world_size, 3, make=built_in_parts, gas=2, clip=0.1)
    check_zero(rank, world_size, 3, make_model=rounded_net, make=built_in_parts, **BF16)


class Recomputed(Net):
    """Its blocks, each through `how` where one is given."""

    def forward(self, x, how=None):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if how is None else how(block, x)
        return self.head(x)


def deepspeed_checkpoint(block, x):
    from deepspeed.runtime.activation_checkpointing import checkpointing

    if not checkpointing.is_configured():
        checkpointing.configure(mpu_=None)
    return checkpointing.checkpoint(block, x)


HOW = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non_reentrant": functools.partial(checkpoint, use_reentrant=False),
    "deepspeed": deepspeed_checkpoint,
}


@by_stage
@pytest.mark.parametrize("how", HOW)
def test_activation_checkpointing(stage, how):
    run_ranks(check_activation_checkpointing, 2, stage, how, limit_s=90)


def check_activation_checkpointing(rank, world_size, stage, how):
    def forward(model, x, step, rank):
        return model(x, HOW[how]) if hasattr(model, "module") else model(x)

    for config in ({"gas": 2, "clip": 0.1}, BF16)[: 2 if stage == 3 else 1]:
        check_zero(rank, world_size, stage, make_model=Recomputed, forward=forward, **config)


class Repeated(Net):
    """The first block once more at the end: its gradients come in two parts."""

    def forward(self, x):
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def shared_net():
    """One block under two names."""
    net = Net()
    net.blocks.append(net.blocks[0])
    return net


@by_stage
def test_a_block_that_is_called_twice(stage):
    run_ranks(check_a_block_that_is_called_twice, 2, stage, limit_s=90)


def check_a_block_that_is_called_twice(rank, world_size, stage):
    for make_model in (Repeated, shared_net):
        for config in ({"gas": 2, "clip": 0.1}, BF16):
            check_zero(rank, world_size, stage, make_model=make_model, **config)


@by_stage
def test_two_forwards_in_one_loss(stage):
    run_ranks(check_two_forwards_in_one_loss, 2, stage, limit_s=90)


def check_two_forwards_in_one_loss(rank, world_size, stage):
    for config in ({"gas": 2, "clip": 0.1}, BF16):
        check_zero(rank, world_size, stage, forward=in_halves, **config)


def in_halves(model, x, step, rank):
    return torch.cat([model(half) for half in x.chunk(2)])


class Side(nn.Module):
    """Blocks of matrices side by side; a loss may leave some of them out."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(INPUTS, 17)
        self.blocks = nn.ModuleList(Bare(17, 29) for _ in range(3))
        self.head = nn.Linear(17, OUTPUTS)

    def forward(self, x, used=(0, 1, 2)):
        x = self.inp(x)
        ways = [block(x) for block in self.blocks]
        return self.head(sum(ways[i] for i in used))


@by_stage
def test_losses_that_leave_matrices_out(stage):
    run_ranks(check_losses_that_leave_matrices_out, 2, stage, limit_s=90)


def check_losses_that_leave_matrices_out(rank, world_size, stage):
    ways = [other_block_in_each_step]
    if stage < 3:  # where DeepSpeed demands the same passes of every rank
        ways.append(other_block_on_each_rank)
    for forward in ways:
        check_zero(rank, world_size, stage, make_model=Side, forward=forward, gas=2, clip=0.1)


def other_block_on_each_rank(model, x, step, rank):
    return model(x, (0, 1 + rank))


def other_block_in_each_step(model, x, step, rank):
    return model(x, (0, 1 + step % 2))


class Idle(Net):
    """With a block and a bias that no forward uses."""

    def __init__(self):
        super().__init__()
        self.blocks.append(Block(17, 9))
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x)


@by_stage
def test_parameters_that_nobody_uses(stage):
    run_ranks(check_parameters_that_nobody_uses, 2, stage, limit_s=90)


def check_parameters_that_nobody_uses(rank, world_size, stage):
    check_zero(rank, world_size, stage, make_model=Idle, gas=2, clip=0.1)


def frozen_net():
    """A managed matrix, a managed bias and a dedicated matrix that nobody trains."""
    net = Net()
    for p in (net.inp.weight, net.blocks[0].down.bias, net.blocks[0].up.weight):
        p.requires_grad_(False)
    return net


@by_stage
def test_frozen_parameters(stage):
    run_ranks(check_frozen_parameters, 2, stage, limit_s=90)


def check_frozen_parameters(rank, world_size, stage):
    check_zero(rank, world_size, stage, make_model=frozen_net, gas=2, clip=0.1)


class Tokens(nn.Module):
    """With an embedding of few words, each of which every batch has."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(8, 17)
        self.blocks = nn.ModuleList([Block(17, 29), Block(17, 18)])
        self.head = nn.Linear(17, OUTPUTS)

    def forward(self, x):
        words = (2 * x[:, :6]).long().clamp(-4, 3) + 4
        x = self.emb(words).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@by_stage
def test_an_embedding_and_a_head(stage):
    run_ranks(check_an_embedding_and_a_head, 2, stage, limit_s=90)


def check_an_embedding_and_a_head(rank, world_size, stage):
    dmuon = {"include": ["*"], "min_ndim": 2}
    engine = check_zero(rank, world_size, stage, make_model=Tokens, dmuon=dmuon, clip=0.1)
    assert {"emb.weight", "head.weight"} < set(engine.dmuon.plan)


@by_stage
@pytest.mark.parametrize("route", ["adamw", "sharded_adamw"])
def test_routes(stage, route):
    run_ranks(check_routes, 2, stage, route, limit_s=90)


def check_routes(rank, world_size, stage, route):
    dmuon = {"include": ["blocks.*"], "routes": {route: ["blocks.0.up"]}}
    engine = check_zero(rank, world_size, stage, dmuon=dmuon, gas=2, clip=0.1)
    assert ("blocks.0.up.weight" in engine.dmuon.plan) == (route == "adamw")

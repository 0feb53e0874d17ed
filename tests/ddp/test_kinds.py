"""Models of every kind, buffers, dtypes and initial values under DDP."""

import copy
import warnings

import dmuon
import pytest
import torch
from torch import nn

from tests.fsdp2.test_kinds import Conv, Experts, InBf16
from tests.support.ddp import (
    BOTH,
    assert_replicas_equal,
    by_both,
    check_ddp,
    put_under_ddp,
    setup_ddp,
)
from tests.support.meshes import dp_tp, flat, on, run_on
from tests.support.models import Block, Net, in_blocks
from tests.support.oracle import Oracle, relative_error
from tests.support.parity import Run, assert_same, full_weights, gathered, three_steps
from tests.support.tp_models import MIXED, mixed
from tests.support.weights import clean_weights, local, owned_weights

# Modules ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Tokens through an embedding, a Linear block, stacked experts and convolutions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 17)
        self.blocks = nn.ModuleList([Block(17, 29), Experts(17, 11), Conv(17, 5)])
        self.head = nn.Linear(17, 20)

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(g):
    return torch.randint(31, (96, 4), generator=g), torch.randn(96, 20, generator=g)


@by_both()
@on([flat(2), flat(3), flat(4)])
def test_convolutions_embeddings_and_experts(layout, by):
    run_on(layout, check_mixed, by)


def check_mixed(rank, layout, by):
    check_ddp(rank, layout, make_model=Mixed, sample=tokens, wrap=BOTH[by], count_ns=False)


# Buffers ---------------------------------------------------------------------------------------


class Normed(Block):
    def __init__(self, dim, hidden):
        super().__init__(dim, hidden)
        self.norm = nn.BatchNorm1d(dim)


def with_batch_norm():
    return Net(block=Normed)


@by_both()
@on([flat(2), flat(3)])
def test_batch_norm_trains_as_one_process_and_evaluates_alike_on_all_ranks(layout, by):
    run_on(layout, check_batch_norm, by)


def check_batch_norm(rank, layout, by):
    """Each rank normalises by its own batch; running values are those of the first rank."""
    check_ddp(rank, layout, steps_then_evaluation, make_model=with_batch_norm, wrap=BOTH[by])


def steps_then_evaluation(run):
    three_steps(run)
    run.model.eval()
    with torch.no_grad():
        x, _ = run.batch(0, 0)
        run.evaluated = run.called(x)
    if run.managed:
        outputs = gathered(run.evaluated)
        assert all(torch.equal(other, outputs[0]) for other in outputs)


def test_both_replicators_leave_the_same_buffers():
    run_on(flat(2), check_same_buffers)


def check_same_buffers(rank, layout):
    ours, torchs = (setup_ddp(layout, make_model=with_batch_norm, wrap=w) for w in BOTH.values())
    for run in (ours, torchs):
        steps_then_evaluation(run)
    want = dict(torchs.model.named_buffers())
    assert_same(dict(ours.model.named_buffers()), want)
    assert any(b.abs().max() > 0 for b in want.values())


def test_buffers_stay_each_ranks_own_on_request():
    run_on(flat(2), check_own_buffers)


def check_own_buffers(rank, layout):
    """And within no_sync, whoever replicates."""
    wrap = lambda model, mesh: dmuon.replicate(model, mesh, broadcast_buffers=False)  # noqa: E731
    run = setup_ddp(layout, make_model=with_batch_norm, wrap=wrap)
    three_steps(run)
    run.model(run.batch(0, rank)[0])
    means = gathered(run.model.blocks[0].norm.running_mean.clone())
    assert not torch.equal(*means)


# Initial values --------------------------------------------------------------------------------


def seeded(rank, make=Net):
    torch.manual_seed(rank)
    return make()


@by_both()
@on([flat(2), flat(3)])
def test_different_initial_values_are_warned_of_once_and_the_first_ranks_count(layout, by):
    run_on(layout, check_initial_values, by)


def check_initial_values(rank, layout, by):
    first, model = seeded(0, with_batch_norm), seeded(rank, with_batch_norm)
    model.blocks[0].norm.running_mean.fill_(float(rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        put_under_ddp(model, layout, in_blocks, BOTH[by])
    texts = [str(w.message) for w in caught if "initial values" in str(w.message)]
    dedicated = [t for t in texts if "blocks.0.up.weight" in t]
    assert len(dedicated) == (0 if rank == 0 else 1), texts
    assert all(f"rank {rank}" in text for text in texts)
    assert len(texts) <= 2, "one for each of the two calls at most"
    weights = {n: p.detach() for n, p in model.named_parameters()}
    assert_same(weights, {n: p.detach() for n, p in first.named_parameters()})
    assert model.blocks[0].norm.running_mean.abs().max() == 0


def test_different_initial_values_with_tensor_parallelism():
    run_on(dp_tp(2, 2), check_initial_values_tp)


def check_initial_values_tp(rank, layout):
    """The TP ranks of one replica cut the same weights; the replicas come with different ones."""
    replica = layout.data_rank(rank)
    model = seeded(replica, mixed)
    with pytest.warns(UserWarning, match=f"rank {rank} ") if replica else warnings.catch_warnings():
        put_under_ddp(model, layout, in_blocks, BOTH["replicate"], MIXED["parallelize"])
    first = seeded(0, mixed)
    assert_same(full_weights(model), {n: p.detach() for n, p in first.named_parameters()})
    shards = {n: local(p).detach() for n, p in model.named_parameters()}
    everyone = gathered(shards)
    assert_same(everyone[rank % 2], everyone[2 + rank % 2])


# bf16 ------------------------------------------------------------------------------------------


@by_both()
@on([flat(2), flat(4)])
def test_bf16_parameters_keep_an_fp32_master(layout, by):
    run_on(layout, check_bf16, by)


def check_bf16(rank, layout, by):
    """After three steps at most twice as far from float32 as one process that computes in bf16."""
    run = setup_ddp(layout, make_model=lambda: Net().bfloat16(), wrap=BOTH[by], criterion=in_fp32)
    three_steps(run)
    assert_replicas_equal(run)
    masters = {p.fqn: p._owned_data for p in dmuon.get_owned_params(run.model, rank)}
    assert {m.dtype for m in masters.values()} == {torch.float32}
    for name, p in clean_weights(run.model).items():
        assert p.dtype == torch.bfloat16
        if name in masters:
            assert torch.equal(p, masters[name].to(torch.bfloat16)), f"{name} is not its master"
    weights = owned_weights(run.model)
    if rank == 0:
        compare_with_one_process(weights, layout)


def compare_with_one_process(weights, layout):
    torch.manual_seed(7)
    start = Net().bfloat16().float()
    low, high = (one_process(layout, copy.deepcopy(start), in_bf16=b) for b in (True, False))
    for name, w in weights.items():
        cost_of_bf16 = relative_error(low[name], high[name])
        assert relative_error(w, high[name]) <= 2 * cost_of_bf16, name


def one_process(layout, net, in_bf16):
    model = InBf16(net) if in_bf16 else net
    chosen = {n for n, p in model.named_parameters() if in_blocks(n, p)}
    ranks = range(layout.ranks)
    three_steps(Run(model, Oracle(model, chosen), ranks, len(ranks), False, criterion=as_float32))
    return clean_weights(net)


def as_float32(model, x, y):
    return nn.functional.mse_loss(model(x).float(), y)


def in_fp32(model, x, y):
    return nn.functional.mse_loss(model(x.bfloat16()).float(), y)

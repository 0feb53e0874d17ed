"""Kinds of weights and uses that meet the tensor-parallel axis in their own way."""

import warnings
from functools import partial

import dmuon
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.meshes import cube, dp_tp, hsdp, on, run_on
from tests.support.models import Net, in_blocks, shard
from tests.support.oracle import Oracle, relative_error, tolerance
from tests.support.parity import (
    Run,
    check_parity,
    clean_weights,
    full_weights,
    owned_weights,
    setup,
    three_steps,
)
from tests.support.tp_models import (
    ATTENTION,
    DIM,
    MIXED,
    Attention,
    PartialInput,
    Residual,
    Transformer,
    as_dtensor,
    linear,
    mixed,
    subject,
    tokens,
)
from tests.support.weights import local

FOUR = [dp_tp(2, 2), dp_tp(1, 4)]


# More than two dims ------------------------------------------------------------------------------


class Experts(nn.Module):
    """Stacked matrices; every expert sees every position."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, 7, DIM) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(5, DIM, 7) / 7**0.5)

    def forward(self, x):
        hidden = torch.tanh(torch.einsum("bsd,ehd->bseh", x, local(self.up)))
        return torch.einsum("bseh,edh->bsd", hidden, local(self.down)) / 5


class ShardedExperts(ParallelStyle):
    """Cuts `up` along one dim and `down` along another; the ranks' outputs are terms of a sum."""

    def __init__(self, up, down):
        super().__init__()
        self.dims = {"up": up, "down": down}

    def _apply(self, module, mesh):
        for name, dim in self.dims.items():
            weight = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(dim)])
            setattr(module, name, nn.Parameter(weight))
        PartialInput()._apply(module, mesh)
        module.register_forward_hook(lambda m, x, out: summed(out, mesh))
        return module


def summed(out, mesh):
    return as_dtensor(out, mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


@on([*FOUR, cube(2, 1, 2)])
@pytest.mark.parametrize("dims", [(0, 0), (1, 2)], ids=["by_expert", "by_feature"])
def test_stacked_experts_cut_along_any_dim(layout, dims):
    run_on(layout, check_experts, dims)


def check_experts(rank, layout, dims):
    """5 experts of 7 features: uneven on 2 and on 4 ranks."""
    for view in (None, "flatten"):
        names = [n for n, p in with_experts().named_parameters() if p.ndim == 3]
        policy = {"overrides": [{"name": "experts", "set": {"view": view}}]}
        check_parity(
            rank,
            layout,
            make_model=with_experts,
            parallelize=partial(parallelize_experts, dims),
            sample=tokens,
            count_ns=False,
            dedicate={"param_policy": policy} if view else {},
            oracle={"views": dict.fromkeys(names, view)} if view else {},
        )


def with_experts():
    return Transformer(Residual(attention=Attention(), experts=Experts(), plain=linear(DIM, DIM)))


def parallelize_experts(dims, model, tp):
    (block,) = model.blocks
    parallelize_module(block.parts.attention, tp, ATTENTION)
    parallelize_module(block.parts, tp, {"experts": ShardedExperts(*dims)})


# Tied ------------------------------------------------------------------------------------------


class Tied(Transformer):
    """The head is the embedding; both are cut by tokens."""

    def __init__(self):
        super().__init__(Residual(attention=Attention()))
        self.head = linear(DIM, self.embed.num_embeddings)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return super().forward(x)[..., :20]


@on([dp_tp(2, 2)])
def test_an_embedding_tied_to_the_head(layout):
    run_on(layout, check_tied)


def check_tied(rank, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # embeddings are usually AdamW's
        run = check_parity(
            rank,
            layout,
            make_model=Tied,
            parallelize=parallelize_tied,
            sample=tokens,
            predicate=lambda n, p: p.ndim == 2,
            dedicate={"hook_boundary_resolver": lambda name, param: ""},
        )
    assert run.model.head.weight is run.model.embed.weight


def parallelize_tied(model, tp):
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    model.head.weight = model.embed.weight
    parallelize_module(model.blocks[0].parts.attention, tp, ATTENTION)


# Meta construction -------------------------------------------------------------------------------


@on([dp_tp(2, 2), hsdp(2, 2), cube(2, 1, 2)])
def test_meta_construction_then_to_empty(layout):
    run_on(layout, check_meta)


def check_meta(rank, layout):
    """Shapes first, values later: afterwards training goes on as with any other values."""
    task = {k: v for k, v in subject(layout).items() if k != "make_model"}
    with torch.device("meta"):
        model = subject(layout).get("make_model", Net)()
    parallelize, mesh = task.pop("parallelize", None), layout.mesh()
    if parallelize is not None:
        parallelize(model, mesh[layout.tp_name])
    dmuon.dedicate_params(model, predicate=in_blocks, **layout.slices(mesh))
    shard(model, layout.data_mesh(mesh))
    model.to_empty(device="cpu")
    initialise(model)
    optimizer = dmuon.Muon(model)
    run = Run(model, optimizer, [layout.data_rank(rank)], layout.data_ranks, managed=True, **task)
    start = full_weights(model)
    for name, w in start.items():
        assert w.isfinite().all() and (w.ndim == 1 or w.std() > 0), f"{name} was not initialised"
    three_steps(run)
    got = full_weights(model)
    plain = subject(layout).get("make_model", Net)()
    plain.load_state_dict(start)
    chosen = {n for n, p in plain.named_parameters() if in_blocks(n, p)}
    ranks = list(range(layout.data_ranks))
    three_steps(Run(plain, Oracle(plain, chosen), ranks, len(ranks), managed=False, **task))
    for name, w in clean_weights(plain).items():
        assert relative_error(got[name], w) <= 4 * tolerance(3), name


def initialise(model):
    """Each weight is drawn whole, from a seed of its own: on shards of different sizes the random
    numbers of ranks would run apart."""
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            whole = torch.empty(p.shape)
            if p.ndim == 1:
                whole.fill_(0.5)
            else:
                whole.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
            p.copy_(laid_out_as(p, whole))


def laid_out_as(p, whole):
    if not isinstance(p, DTensor):
        return whole
    everywhere = [Replicate()] * p.device_mesh.ndim
    whole = DTensor.from_local(whole, p.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=p.placements)


@on([dp_tp(2, 2), hsdp(2, 2), cube(2, 1, 2)])
def test_initial_values_are_those_of_one_rank_whoever_owns(layout):
    run_on(layout, check_initial_values)


def check_initial_values(rank, layout):
    """Plain weights that start apart, on the TP ranks of one cell too, are one weight from then on."""
    torch.manual_seed(100 + rank)
    plain = subject(layout).get("make_model", Net)()
    mine = {n: p.detach().clone() for n, p in plain.named_parameters()}
    run = setup(layout, **subject(layout) | {"make_model": lambda: plain})
    start = owned_weights(run.model)
    name = "blocks.1.parts.plain.weight" if layout.tp_name else "blocks.1.up.weight"
    for p in dmuon.get_owned_params(run.model, rank):
        if p.fqn == name and p.is_tp_owner:
            assert torch.equal(start[name], mine[name])
    three_steps(run)
    assert not torch.equal(owned_weights(run.model)[name], start[name])


@on([dp_tp(2, 2)])
def test_between_uses_a_rank_holds_its_own_shards_only(layout):
    run_on(layout, check_held)


def check_held(rank, layout):
    model = setup(layout, **MIXED).model
    parts = model.blocks[0].parts
    for p in (parts.attention.q.weight, parts.gated.down.weight):
        assert isinstance(p, DTensor) and p.shape == p.full_tensor().shape
    owned = {p.fqn: p for p in dmuon.get_owned_params(model, rank)}
    for name, p in model.named_parameters():
        if name in owned:
            assert owned[name]._owned_data.shape == local(p).shape
            assert owned[name]._owned_data.dtype == torch.float32
    held = sum(p._owned_data.numel() for p in owned.values())
    whole = sum(p.numel() for n, p in mixed().named_parameters() if in_blocks(n, p))
    assert held < 0.75 * whole, "two cells share the weights, and the TP ranks of each its shards"

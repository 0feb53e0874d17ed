"""Tensor parallelism: whole-matrix Newton-Schulz on one TP rank, whatever the shards look like."""

import warnings
from functools import partial

import dmuon
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.mesh.test_hsdp import read_after_each_step
from tests.support.meshes import cube, dp_tp, flat, on, run_on
from tests.support.models import Net, in_blocks
from tests.support.oracle import relative_error, tolerance
from tests.support.parity import (
    assert_same,
    check_parity,
    full_weights,
    gathered,
    setup,
    three_steps,
    total,
)
from tests.support.tp_models import MIXED, mixed, parallelize_mixed, tokens

MATRICES = sum(in_blocks(n, p) for n, p in mixed().named_parameters())
FOUR = [dp_tp(2, 2), dp_tp(1, 4)]


def weights_of(layout, **options):
    run = setup(layout, **(MIXED | options))
    three_steps(run)
    return full_weights(run.model)


# Bitwise ---------------------------------------------------------------------------------------


@on([*FOUR, cube(2, 2, 2)])
def test_publishing_packing_and_buffers_change_no_bit(layout):
    run_on(layout, check_bitwise)


def check_bitwise(rank, layout):
    forms = (False, True, "gather", "scatter", "all") if layout.ranks == 4 else ("all",)
    reference = weights_of(layout)
    for muon in ({"replicate_async": True}, {"replicate_async": False}):
        assert_same(weights_of(layout, muon=muon), reference)
    assert_same(weights_of(layout, dedicate={"pack_small_params": False}), reference)
    for form in forms:
        run = setup(layout, **MIXED, dedicate={"tp_buffer_reuse": form})
        three_steps(run)
        assert_same(full_weights(run.model), reference)
        staging = dmuon.report(run.model)["tensor_parallel"]["staging"]
        for direction in ("gather", "scatter"):
            reused = form in (True, "all", direction)
            assert staging[direction]["reused"] == reused
            assert (staging[direction]["saved_bytes"] > 0) == reused, "three units, one buffer"


def test_one_tp_rank_is_no_tp_axis_bit_for_bit():
    run_on(dp_tp(4, 1), check_one_tp_rank)


def check_one_tp_rank(rank, layout):
    nets = {"make_model": Net, "parallelize": parallelize_net}
    with_axis, without = setup(layout, **nets), setup(flat(layout.ranks))
    for run in (with_axis, without):
        three_steps(run)
    assert_same(full_weights(with_axis.model), full_weights(without.model))
    assert all(p.tp_group is None for p in dmuon.get_dedicated_params(with_axis.model))


def parallelize_net(model, tp):
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def test_the_tp_axis_may_have_any_name():
    run_on(dp_tp(2, 2, "model"), check_other_name)


def check_other_name(rank, layout):
    assert_same(weights_of(layout), weights_of(dp_tp(2, 2)))


# The asynchronous publish ------------------------------------------------------------------------


@on([dp_tp(2, 2), cube(2, 1, 2)])
def test_whoever_reads_after_an_asynchronous_step_sees_the_whole_update(layout):
    run_on(layout, check_readers)


def check_readers(rank, layout):
    seen = [list(read_after_each_step(layout, asynchronous)) for asynchronous in (True, False)]
    for asynchronous, synchronous in zip(*seen, strict=True):
        assert_same(asynchronous, synchronous)


# Distributed Gram ------------------------------------------------------------------------------


@on([dp_tp(2, 2), dp_tp(1, 4), cube(2, 1, 2)])
def test_the_distributed_gram_equals_one_process(layout):
    run_on(layout, check_gram)


def check_gram(rank, layout):
    """And the undistributed path to twice the tolerance that each of them has to the truth."""
    reference = weights_of(layout)
    used = {}
    for policy in ("never", "beneficial", "always"):
        muon = {"tp_distributed_gram": True, "tp_distributed_gram_policy": policy}
        run = check_parity(rank, layout, muon=muon, **MIXED)
        weights = full_weights(run.model)
        for name, want in reference.items():
            assert relative_error(weights[name], want) <= 2 * tolerance(3), name
        matrices = dmuon.report(run.model)["tensor_parallel"]["distributed_gram"]
        used[policy] = {m["name"]: m["saved_bytes"] for m in matrices}
    assert not used["never"]
    assert used["beneficial"].items() <= used["always"].items()
    assert all(saved > 0 for saved in used["beneficial"].values())
    assert "blocks.0.parts.gated.down.weight" in used["always"], "columns, uneven"
    assert "blocks.0.parts.gated.gate.weight" in used["always"], "rows, uneven"


# Who owns what ---------------------------------------------------------------------------------


@on([*FOUR, cube(2, 2, 2)])
def test_every_rank_runs_some_newton_schulz_and_the_job_each_once(layout):
    run_on(layout, check_tp_owners)


def check_tp_owners(rank, layout):
    run = setup(layout, **MIXED)
    three_steps(run)
    report = dmuon.report(run.model)
    running = [p for p in dmuon.get_owned_params(run.model, rank) if p.is_tp_owner]
    assert running, "an idle rank, and more matrices than ranks"
    assert report["ns_calls_last_step"] == len(running)
    assert total(report["ns_calls_last_step"]) == MATRICES
    assert total(report["ns_calls"]) == 3 * MATRICES


@on([dp_tp(2, 2), dp_tp(1, 4)])
def test_the_inspection_listing_prints_what_it_describes(layout):
    run_on(layout, check_listing)


def check_listing(rank, layout):
    local = {}
    whole = {n: tuple(p.shape) for n, p in mixed().named_parameters()}
    model = setup(layout, **MIXED | {"parallelize": partial(noting, local)}).model
    lines = []

    for dp in dmuon.get_owned_params(model, rank=dist.get_rank()):
        lines.append(
            f"{dp.param_name}: "
            f"local={tuple(dp._orig_size)}, "
            f"full={tuple(dp.full_shape)}, "
            f"shard_dim={dp.shard_dim}, "
            f"is_tp_owner={dp.is_tp_owner}, "
            f"tp_group_size={dp.tp_group.size() if dp.tp_group else 1}"
        )

    for dp, line in zip(dmuon.get_owned_params(model, rank), lines, strict=True):
        name, sharded = dp.param_name, local[dp.param_name] != whole[dp.param_name]
        assert f"{name}: local={local[name]}, full={whole[name]}, shard_dim=" in line
        if sharded:
            assert dp.shard_dim in (0, 1) and f"tp_group_size={layout.tp}" in line
    runs = gathered({dp.param_name for dp in dmuon.get_owned_params(model, rank) if dp.is_tp_owner})
    assert sorted(name for names in runs for name in names) == sorted(filter(in_block, whole))


def noting(local, model, tp):
    """Parallelises, and writes down the shapes of the shards."""
    parallelize_mixed(model, tp)
    for name, p in model.named_parameters():
        local[name] = tuple(p.to_local().shape if hasattr(p, "to_local") else p.shape)


def in_block(name):
    return name in {n for n, p in mixed().named_parameters() if in_blocks(n, p)}


# Weights of other kinds ------------------------------------------------------------------------


@on(FOUR)
def test_the_adamw_route_and_frozen_weights(layout):
    run_on(layout, check_routes_and_frozen)


def check_routes_and_frozen(rank, layout):
    for route in ("adamw", "sharded_adamw"):
        policy = {"overrides": [{"name": "gated", "set": {"route": route}}]}
        muon_names = lambda n, p: in_blocks(n, p) and "gated" not in n  # noqa: E731
        dedicate = {"param_policy": policy}
        check_parity(rank, layout, dedicate=dedicate, muon_names=muon_names, **MIXED)
    run = check_parity(rank, layout, freeze_then_thaw, **MIXED)
    assert all(p.requires_grad for p in run.model.parameters())


def freeze_then_thaw(run):
    """Of one sharded by columns, by rows, in stripes, whole and plain: never all of a unit."""
    first, second, third = (block.parts for block in run.model.blocks)
    frozen = [
        first.attention.q.weight,
        first.attention.o.weight,
        second.plain.weight,
        third.attention.qkv.weight,
        third.whole.weight,
    ]
    for step in range(3):
        for p in frozen:
            p.requires_grad_(step == 1)
        run.train(step)
    for p in frozen:
        p.requires_grad_(True)


@on([dp_tp(2, 2)])
@pytest.mark.parametrize("style", [RowwiseParallel, ColwiseParallel])
def test_a_dedicated_embedding(layout, style):
    run_on(layout, check_embedding, style)


def check_embedding(rank, layout, style):
    """By rows or by columns; 31 tokens and 16 features over 2 ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that AdamW usually trains it better
        check_parity(
            rank,
            layout,
            make_model=mixed,
            sample=tokens,
            parallelize=lambda model, tp: parallelize_module(
                model, tp, {"embed": style(input_layouts=Replicate(), output_layouts=Replicate())}
            ),
            predicate=lambda n, p: p.ndim == 2,
        )


@on(FOUR)
def test_sharded_weights_survive_to_a_saved_state(layout):
    run_on(layout, check_saved_state)


def check_saved_state(rank, layout):
    run = setup(layout, **MIXED)
    three_steps(run)
    want = full_weights(run.model)
    state = dmuon.get_model_state_dict(run.model, rank0_only=False)
    assert_same({name: torch.as_tensor(value) for name, value in state.items()}, want)

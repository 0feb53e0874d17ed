"""Meshes and placements that do not fit: one text on every rank, before anything has changed."""

from functools import partial

import dmuon
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.fsdp2.test_errors import count_hooks
from tests.support.meshes import SQUARE, cube, hsdp, run_on
from tests.support.models import Net, in_blocks, shard
from tests.support.parity import (
    assert_all_raise,
    assert_same,
    full_weights,
    put_under_dmuon,
    setup,
    three_steps,
)
from tests.support.tp_models import ATTENTION, GATED, MIXED, mixed, parallelize_mixed
from tests.support.weights import local


def assert_refused(model, *words, kind="ValueError", predicate=in_blocks, **options):
    """`dedicate_params` raises on all ranks with one text, and the model is as it was."""
    before = {n: (id(p), local(p).detach().clone()) for n, p in model.named_parameters()}
    hooks = count_hooks(model)
    assert_all_raise(
        lambda: dmuon.dedicate_params(model, predicate=predicate, **options), kind, *words
    )
    assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    for name, p in model.named_parameters():
        assert torch.equal(local(p), before[name][1]), f"{name} changed"
    assert count_hooks(model) == hooks, "hooks stayed behind"


def assert_usable(layout, model, parallelize=None):
    """What was refused can be set up properly afterwards."""
    put_under_dmuon(model, layout, in_blocks, shard, parallelize)
    assert full_weights(model)


def seeded(make):
    torch.manual_seed(7)
    return make()


# Which meshes ----------------------------------------------------------------------------------


def test_an_unnamed_mesh_with_tensor_parallel_weights():
    run_on(SQUARE, check_unnamed)


def check_unnamed(rank, layout):
    """The weight's mesh has no names, or the data-parallel one."""
    named, unnamed = layout.mesh(), init_device_mesh("cpu", (2, 2))
    model = seeded(Net)
    distribute(model.blocks[0].up, unnamed, [Replicate(), Shard(0)])
    assert_refused(model, "blocks.0.up.weight", "mesh_dim_names", mesh=named["dp"])
    model = seeded(Net)
    distribute(model.blocks[0].up, named["tp"], [Shard(0)])
    columns = [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])]
    assert_refused(model, "blocks.0.up.weight", "mesh_dim_names", mesh=columns[rank % 2])


def distribute(module, mesh, placements):
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))


def test_more_than_one_tensor_parallel_dim():
    run_on(cube(1, 2, 2), check_two_tp_dims)


def check_two_tp_dims(rank, layout):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "rows", "columns"))
    model = seeded(Net)
    distribute(model.blocks[0].up, mesh["rows", "columns"], [Shard(0), Shard(1)])
    assert_refused(model, "blocks.0.up.weight", "rows", "columns", "one", mesh=mesh["dp"])


def test_tensor_parallelism_over_two_axes_in_turn():
    run_on(cube(1, 2, 2), check_two_axes)


def check_two_axes(rank, layout):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "one", "other"))
    model = seeded(Net)
    distribute(model.blocks[0].up, mesh["one"], [Shard(0)])
    distribute(model.blocks[1].up, mesh["other"], [Shard(0)])
    assert_refused(model, "blocks.0.up.weight", "blocks.1.up.weight", mesh=mesh["dp"])


def test_the_tensor_parallel_mesh_as_the_data_parallel_one():
    run_on(SQUARE, check_tp_as_dp)


def check_tp_as_dp(rank, layout):
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    assert_refused(model, "weight", "'tp'", "data-parallel", mesh=mesh["tp"])
    assert_refused(
        model, "weight", "'tp'", "data-parallel", mesh=mesh["dp"], replicate_mesh=mesh["tp"]
    )
    assert_usable(layout, model)


def test_replicate_and_shard_meshes_that_overlap():
    run_on(hsdp(2, 2), check_overlap)


def check_overlap(rank, layout):
    mesh, model = layout.mesh(), seeded(Net)
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for pair in ((mesh["shard"], mesh["shard"]), (flat, mesh["replicate"]), (flat, flat)):
        options = dict(zip(("mesh", "replicate_mesh"), pair, strict=True))
        assert_refused(model, "replicate_mesh", "overlap", **options)
    assert_refused(model, "mesh", "dims", mesh=mesh)
    assert_refused(model, "replicate_mesh", "dims", mesh=mesh["shard"], replicate_mesh=mesh)
    assert_usable(layout, model)


def test_meshes_that_do_not_span_the_job():
    run_on(hsdp(2, 2), check_span)


def check_span(rank, layout):
    """A slice whose other ranks nothing explains: each would train a model of its own."""
    mesh, model = layout.mesh(), seeded(Net)
    assert_refused(model, "'shard'", "2 of the 4 ranks", "replicate_mesh", mesh=mesh["shard"])
    assert_refused(model, "'replicate'", "2 of the 4 ranks", mesh=mesh["replicate"])
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    assert_refused(model, "'dp'", "2 of the 4 ranks", "parallelize_module", mesh=other["dp"])
    assert_usable(layout, model)


def test_a_replicate_slice_left_out_beside_tensor_parallelism():
    run_on(cube(2, 1, 2), check_span_with_tp)


def check_span_with_tp(rank, layout):
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    assert_refused(model, "'shard'", "2 of the 4 ranks", "replicate_mesh", mesh=mesh["shard"])
    assert_usable(layout, model)


# The order of calls ------------------------------------------------------------------------------


def test_dedicated_before_parallelised():
    run_on(SQUARE, check_too_early)


def check_too_early(rank, layout):
    """Found by dedicate_params, which misses the axis; found by parallelize_module where another
    weight has shown it."""
    mesh, model = layout.mesh(), seeded(mixed)
    assert_refused(model, "parallelize_module", mesh=mesh["dp"])
    first = model.blocks[0].parts
    parallelize_module(first.attention, mesh["tp"], ATTENTION)
    dmuon.dedicate_params(model, mesh["dp"], predicate=in_blocks)
    assert_all_raise(
        lambda: parallelize_module(first.gated, mesh["tp"], GATED),
        "ValueError",
        "parallelize_module",
        "dedicate_params",
        "gate.weight",
    )
    shard(model, mesh["dp"])
    assert full_weights(model), "what was refused has harmed the model"


def test_dedicated_after_fully_shard():
    run_on(SQUARE, check_too_late)


def check_too_late(rank, layout):
    mesh, model = layout.mesh(), seeded(Net)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel()})
    shard(model, mesh["dp"])
    assert_all_raise(
        lambda: dmuon.dedicate_params(model, mesh["dp"], predicate=in_blocks),
        "ValueError",
        "before fully_shard",
    )


# Weights and options -----------------------------------------------------------------------------


def test_a_pending_partial_placement():
    run_on(SQUARE, check_partial)


def check_partial(rank, layout):
    mesh, model = layout.mesh(), seeded(Net)
    up = model.blocks[0].up
    up.weight = nn.Parameter(DTensor.from_local(up.weight.detach(), mesh["tp"], [Partial()]))
    assert_refused(model, "blocks.0.up.weight", "pending placement", mesh=mesh["dp"])
    assert_refused(
        model,
        "blocks.0.up.weight",
        "pending placement",
        mesh=mesh["dp"],
        param_policy={"defaults": {"route": "adamw"}},
    )


def test_options_of_tensor_parallelism():
    run_on(SQUARE, check_options)


def check_options(rank, layout):
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    for form in ("both", "Gather", 1.5, None):
        assert_refused(model, "tp_buffer_reuse", repr(form), mesh=mesh["dp"], tp_buffer_reuse=form)
    assert_usable(layout, model)
    for policy in ("sometimes", True, None):
        assert_all_raise(
            partial(dmuon.Muon, model, tp_distributed_gram=True, tp_distributed_gram_policy=policy),
            "ValueError",
            "tp_distributed_gram_policy",
            repr(policy),
        )


def test_options_that_differ_between_tp_ranks():
    run_on(SQUARE, check_different_options)


def check_different_options(rank, layout):
    """The ranks of one cell agree too, not only those of one data-parallel axis."""
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    odd = rank % 2 == 1
    options = {"mesh": mesh["dp"], "tp_buffer_reuse": "gather" if odd else False}
    assert_refused(model, "arguments of dedicate_params", **options)
    assert_refused(
        model,
        "blocks.1.parts.plain.weight",
        mesh=mesh["dp"],
        predicate=lambda n, p: in_blocks(n, p) and not (odd and ".plain." in n),
    )
    assert_usable(layout, model)
    for keyword, usual, other in (
        ("tp_distributed_gram", False, True),
        ("replicate_async", False, True),
        ("ns_steps", 5, 6),
    ):
        run = setup(layout, **MIXED)
        options = {keyword: other if odd else usual}
        assert_all_raise(partial(train_with, run, options), "ValueError", keyword)


def train_with(run, options):
    run.optimizer = dmuon.Muon(run.model, **options)
    run.train(0)


# A step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SQUARE, hsdp(2, 2)], ids=str)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(layout):
    run_on(layout, check_nonfinite)


def check_nonfinite(rank, layout):
    run = setup(layout, **(MIXED if layout.tp_name else {}))
    three_steps(run)
    before = full_weights(run.model)
    spoilt = layout.data_rank(rank) == 1
    (run.loss(3, run.ranks[0]) * (float("nan") if spoilt else 1.0)).backward()
    assert_all_raise(run.optimizer.step, "RuntimeError", "blocks.", "not finite")
    assert_same(full_weights(run.model), before)
    run.optimizer.zero_grad()
    run.train(4)
    assert all(w.isfinite().all() for w in full_weights(run.model).values())

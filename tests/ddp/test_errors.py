"""Calls that do not fit: one text on every rank, before anything has changed."""

from functools import partial

import dmuon
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.fsdp2.test_errors import count_hooks
from tests.support.ddp import put_under_ddp, replicated, setup_ddp, wrapped
from tests.support.meshes import SQUARE, flat, run_on
from tests.support.models import Net, in_blocks
from tests.support.parity import assert_all_raise, full_weights, three_steps
from tests.support.tp_models import MIXED, mixed, parallelize_mixed
from tests.support.weights import local


def seeded(make=Net):
    torch.manual_seed(7)
    return make()


def assert_refused(model, call, *words, kind="ValueError"):
    """`call` raises on all ranks with one text, and the model is as it was."""
    before = {n: (id(p), local(p).detach().clone()) for n, p in model.named_parameters()}
    hooks = count_hooks(model)
    assert_all_raise(call, kind, *words)
    for name, p in model.named_parameters():
        same, value = before.pop(name)
        assert id(p) == same, f"{name} was replaced"
        torch.testing.assert_close(local(p), value, rtol=0, atol=0, equal_nan=True)
    assert not before and count_hooks(model) == hooks, "parameters are gone or hooks are left"


def dedicate(model, mesh, **keywords):
    return partial(dmuon.dedicate_params_ddp, model, mesh, in_blocks, **keywords)


# Tensor parallelism ------------------------------------------------------------------------------


def test_tensor_parallel_weights_without_the_call_for_them():
    run_on(SQUARE, check_tensor_parallel)


def check_tensor_parallel(rank, layout):
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    assert_refused(
        model,
        dedicate(model, mesh["dp"]),
        "blocks.0.parts.attention.q.weight",
        "dedicate_params_ddp_tp",
        "replicate_tp",
    )
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], in_blocks)
    assert three_steps_of(dmuon.replicate_tp(model, mesh["dp"]))


def test_symmetric_tensor_parallel_parameters_without_the_call_for_them():
    run_on(SQUARE, check_symmetric_tp)


def check_symmetric_tp(rank, layout):
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    plain = lambda n, p: n.endswith("parts.plain.weight")  # noqa: E731
    dmuon.dedicate_params_ddp(model, mesh["dp"], plain)
    assert_refused(
        model, partial(dmuon.replicate, model, mesh["dp"]), "attention.q.weight", "replicate_tp"
    )


def test_a_mesh_with_a_tensor_parallel_axis_given_whole():
    run_on(SQUARE, check_whole_mesh)


def check_whole_mesh(rank, layout):
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    for call in (dmuon.dedicate_params_ddp, dmuon.dedicate_params_ddp_tp):
        assert_refused(model, partial(call, model, mesh, in_blocks), "2 dims", "mesh['dp']")
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], in_blocks)
    assert_refused(model, partial(dmuon.replicate_tp, model, mesh), "2 dims", "mesh['dp']")


def test_the_tensor_parallel_mesh_as_the_data_parallel_one():
    run_on(SQUARE, check_tp_as_dp)


def check_tp_as_dp(rank, layout):
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    call = partial(dmuon.dedicate_params_ddp_tp, model, mesh["tp"], in_blocks)
    assert_refused(model, call, "'tp'", "data-parallel")
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], in_blocks)
    call = partial(dmuon.replicate_tp, model, mesh["tp"])
    assert_refused(model, call, "replicate", "'tp'", "dedicate_params_ddp")


def test_parallelised_after_dedicating():
    run_on(SQUARE, check_too_late)


def check_too_late(rank, layout):
    """On a mesh whose other axis is one of replicas: the weights are whole."""
    mesh, model = layout.mesh(), seeded(mixed)
    parallelize_mixed(model, mesh["tp"])
    dmuon.dedicate_params_ddp_tp(model, mesh["dp"], in_blocks)
    call = partial(parallelize_module, model.blocks[0].parts, mesh["tp"], {})
    assert_refused(model, call, "parallelize_module", "dedicate")


# The order of calls ------------------------------------------------------------------------------


def test_torchs_wrapper_before_dedicating():
    run_on(flat(2), check_wrapped_first)


def check_wrapped_first(rank, layout):
    mesh, model = layout.mesh(), seeded()
    wrapper = DistributedDataParallel(model)
    for given in (wrapper, model):
        assert_refused(
            given, dedicate(given, mesh), "DistributedDataParallel", "dedicate_params_ddp first"
        )


def test_both_replicators():
    run_on(flat(2), check_both)


def check_both(rank, layout):
    mesh = layout.mesh()
    model = setup_ddp(layout).model
    assert_refused(model, partial(DistributedDataParallel, model), "dmuon.replicate", "either")
    model = setup_ddp(layout, wrap=wrapped).model
    assert_refused(
        model, partial(dmuon.replicate, model, mesh), "DistributedDataParallel", "either"
    )


def test_replicated_before_dedicating_and_twice():
    run_on(flat(2), check_replicated_early)


def check_replicated_early(rank, layout):
    mesh, model = layout.mesh(), seeded()
    call = partial(dmuon.replicate, model, mesh)
    assert_refused(model, call, "no dedicated parameters", "dedicate_params_ddp")
    dedicate(model, mesh)()
    call()
    assert_refused(model, call, "replicate was called", "once")
    assert_refused(model, dedicate(model, mesh), "already", "once")
    assert three_steps_of(model)


def three_steps_of(model):
    """Whether what was refused has left the model fit to train."""
    return dmuon.Muon(model) is not None and bool(full_weights(model))


def test_parameters_that_nobody_replicates():
    run_on(flat(2), check_neither)


def check_neither(rank, layout):
    mesh, model = layout.mesh(), seeded()
    dedicate(model, mesh)()
    assert_refused(
        model,
        partial(dmuon.Muon, model),
        "inp.weight",
        "dmuon.replicate",
        "DistributedDataParallel",
    )
    dmuon.replicate(model, mesh)
    dmuon.Muon(model)


def test_nobody_is_needed_where_all_parameters_are_dedicated():
    run_on(flat(2), check_all_dedicated)


def check_all_dedicated(rank, layout):
    model = nn.Sequential(nn.Linear(24, 17, bias=False), nn.Linear(17, 20, bias=False))
    dmuon.dedicate_params_ddp(model, layout.mesh(), lambda n, p: True)
    run = setup_ddp(
        layout,
        make_model=lambda: seeded(matrices),
        predicate=lambda n, p: True,
        wrap=lambda model, mesh: model,
    )
    three_steps(run)
    dmuon.Muon(model)


def matrices():
    return nn.Sequential(nn.Linear(24, 17, bias=False), nn.Linear(17, 20, bias=False))


# Runtimes mixed up -------------------------------------------------------------------------------


def test_one_runtime_for_a_model():
    run_on(flat(2), check_runtimes)


def check_runtimes(rank, layout):
    mesh, model = layout.mesh(), seeded()
    dedicate(model, mesh)()
    call = partial(dmuon.dedicate_params, model, mesh, predicate=in_blocks)
    assert_refused(model, call, "already", "once")
    model = seeded()
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    assert_refused(model, dedicate(model, mesh), "already", "once")
    call = partial(dmuon.replicate, model, mesh)
    assert_refused(model, call, "dedicate_params_ddp", "fully_shard")
    assert_refused(model, partial(DistributedDataParallel, model), "dedicate_params_ddp")


def test_a_model_that_went_through_fully_shard():
    run_on(flat(2), check_fully_sharded)


def check_fully_sharded(rank, layout):
    mesh, model = layout.mesh(), seeded()
    fully_shard(model, mesh=mesh)
    assert_refused(model, dedicate(model, mesh), "fully_shard")


def test_fully_shard_after_dedicating_for_ddp():
    run_on(flat(2), check_shard_late)


def check_shard_late(rank, layout):
    mesh, model = layout.mesh(), seeded()
    dedicate(model, mesh)()
    assert_refused(
        model, partial(fully_shard, model, mesh=mesh), "dedicate_params_ddp", "dedicate_params("
    )


# Keywords ----------------------------------------------------------------------------------------


def test_keywords():
    run_on(flat(2), check_keywords)


def check_keywords(rank, layout):
    mesh, model = layout.mesh(), seeded()
    for keyword, words in (
        ({"pack_smal_params": True}, ("pack_smal_params", "pack_small_params")),
        ({"reshard_after_forward": True}, ("reshard_after_forward",)),
        ({"replicate_mesh": mesh}, ("replicate_mesh",)),
        ({"owner_strategy": "random"}, ("owner_strategy", "random", "lpt")),
        ({"max_owners_per_group": 0}, ("max_owners_per_group", "0")),
    ):
        assert_refused(model, dedicate(model, mesh, **keyword), *words)
    nothing = partial(dmuon.dedicate_params_ddp, model, mesh, lambda n, p: False)
    assert_refused(model, nothing, "predicate")
    uneven = lambda n, p: in_blocks(n, p) and (rank == 0 or ".up." in n)  # noqa: E731
    assert_refused(model, partial(dmuon.dedicate_params_ddp, model, mesh, uneven), ".down.weight")
    put_under_ddp(model, layout, in_blocks, replicated)


def test_options_of_the_optimizer_that_differ_between_ranks():
    run_on(SQUARE, check_optimizer_options)


def check_optimizer_options(rank, layout):
    for keyword, usual, other in (("replicate_async", False, True), ("ns_steps", 5, 6)):
        model = setup_ddp(layout, **MIXED).model
        call = partial(dmuon.Muon, model, **{keyword: other if rank == 1 else usual})
        assert_refused(model, call, keyword)

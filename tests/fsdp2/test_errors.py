"""Bad input: every rank raises the same text, which names the parameter, before anything moves."""

import copy
import pickle
from functools import partial

import dmuon
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import INPUTS, Bare, Net, in_blocks, shard
from tests.support.parity import (
    Run,
    assert_all_raise,
    assert_same,
    check_parity,
    cpu_mesh,
    errors_of_all,
    full_weights,
    setup,
    three_steps,
)
from tests.support.ranks import retire, run_ranks


def assert_setup_is_refused(world_size, model, predicate, kind, *words, mesh=None, **options):
    """Refused on all ranks with one text; the model is untouched and a proper setup still works."""
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    hooks = count_hooks(model)
    assert_all_raise(
        lambda: dmuon.dedicate_params(
            model, mesh or cpu_mesh(world_size), predicate=predicate, **options
        ),
        kind,
        *words,
    )
    after = {n: id(p) for n, p in model.named_parameters()}
    assert after == {n: address for n, (address, _) in before.items()}, "parameters were replaced"
    for name, (_, value) in before.items():
        assert torch.equal(model.get_parameter(name), value), f"{name} changed"
    assert count_hooks(model) == hooks, "hooks stayed behind"


def count_hooks(model):
    return [
        len(getattr(m, table))
        for m in model.modules()
        for table in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
    ]


def assert_usable(rank, world_size, model, predicate=in_blocks, wrap=shard):
    mesh = cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=predicate)
    wrap(model, mesh)
    three_steps(Run(model, dmuon.Muon(model), [rank], world_size, managed=True))


# F01, F08: the predicate -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_ranks_predicate_differs(world_size):
    run_ranks(check_predicate_differs, world_size)


def check_predicate_differs(rank, world_size):
    last = world_size - 1
    model = seeded(Net)
    assert_setup_is_refused(
        world_size,
        model,
        lambda n, p: in_blocks(n, p) and (rank != last or n != "blocks.1.up.weight"),
        "ValueError",
        "blocks.1.up.weight",
        str(last),
    )
    assert_setup_is_refused(
        world_size,
        model,
        lambda n, p: in_blocks(n, p) or (rank == 0 and n == "head.weight"),
        "ValueError",
        "head.weight",
        "0",
    )
    assert_usable(rank, world_size, model)


def seeded(make):
    torch.manual_seed(7)
    return make()


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_predicate_raises_on_one_rank(world_size):
    run_ranks(check_predicate_raises, world_size)


def check_predicate_raises(rank, world_size):
    def predicate(name, param):
        if rank == 1 and name == "blocks.0.up.weight":
            raise KeyError("no such layer: 7")
        return in_blocks(name, param)

    model = seeded(Net)
    errors = errors_of_all(
        lambda: dmuon.dedicate_params(model, cpu_mesh(world_size), predicate=predicate)
    )
    assert None not in errors, errors
    assert all("no such layer: 7" in text for _, text in errors), errors
    assert_usable(rank, world_size, model)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_predicate_that_selects_nothing(world_size):
    run_ranks(check_selects_nothing, world_size)


def check_selects_nothing(rank, world_size):
    model = seeded(Net)
    assert_setup_is_refused(world_size, model, lambda n, p: False, "ValueError", "predicate")
    assert_usable(rank, world_size, model)


# F03: other shapes and dtypes (F02, another order, is fine: test_parity) -------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_shapes_and_dtypes_that_differ_between_ranks(world_size):
    run_ranks(check_other_shapes, world_size)


def check_other_shapes(rank, world_size):
    wider = Net(dims=((17, 29), (17, 19 if rank == 1 else 18)))
    assert_setup_is_refused(
        world_size, wider, in_blocks, "ValueError", "blocks.1.up.weight", "19", "18"
    )
    model = seeded(Net)
    if rank == 0:
        model.blocks[0].up.weight.data = model.blocks[0].up.weight.data.double()
    assert_setup_is_refused(world_size, model, in_blocks, "ValueError", "blocks.0.up.weight", "64")


# F04: other initial values ---------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_initial_values_are_those_of_one_rank_whoever_owns(world_size):
    run_ranks(check_initial_values, world_size)


def check_initial_values(rank, world_size):
    """Ranks that start apart train together: all compute with the owner's weight."""
    torch.manual_seed(100 + rank)
    model, mesh = Net(block=Bare), cpu_mesh(world_size)
    mine = {n: p.detach().clone() for n, p in model.named_parameters()}
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    shard(model, mesh)
    weights = full_weights(model)
    for p in dmuon.get_owned_params(model, rank):
        assert torch.equal(weights[p.fqn], mine[p.fqn])
    three_steps(Run(model, dmuon.Muon(model), [rank], world_size, managed=True))


# F05: hyper-parameters that differ ---------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_hyper_parameters_that_differ_between_ranks(world_size):
    run_ranks(check_other_hyper_parameters, world_size)


def check_other_hyper_parameters(rank, world_size):
    for keyword, usual, other in (
        ("ns_steps", 5, 6),
        ("nesterov", True, False),
        ("momentum", 0.95, 0.9),
        ("ns_backend", "gram", "direct"),
        ("replicate_async", True, False),
    ):
        run = setup(world_size)
        options = {keyword: other if rank == 1 else usual}
        assert_all_raise(partial(remake_and_train, run, options), "ValueError", keyword)


def remake_and_train(run, options):
    run.optimizer = dmuon.Muon(run.model, **options)
    run.train(0)


@pytest.mark.parametrize("world_size", [2])
def test_a_learning_rate_that_differs_is_found_at_the_step(world_size):
    run_ranks(check_other_lr, world_size)


def check_other_lr(rank, world_size):
    run = setup(world_size)
    run.train(0)
    before = full_weights(run.model)
    run.optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
    run.loss(1, rank).backward()
    assert_all_raise(run.optimizer.step, "ValueError", "learning rates")
    assert_same(full_weights(run.model), before)
    run.optimizer.param_groups[0]["lr"] = 0.01
    run.optimizer.zero_grad()
    run.train(2)


@pytest.mark.parametrize("world_size", [2])
def test_setup_options_that_differ_between_ranks(world_size):
    run_ranks(check_other_options, world_size)


def check_other_options(rank, world_size):
    for options in (
        {"pack_small_params": rank == 0},
        {"reshard_after_forward": rank == 0},
        {"process_group_policy": "isolated" if rank == 0 else "shared"},
    ):
        assert_setup_is_refused(
            world_size,
            seeded(Net),
            in_blocks,
            "ValueError",
            "arguments of dedicate_params",
            **options,
        )


# F06: the environment --------------------------------------------------------------------------
# Held by the plan's digest; tests/engine covers it.

# F07: what can be dedicated ----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_vectors_and_scalars_are_refused_by_name(world_size):
    run_ranks(check_vectors, world_size)


def check_vectors(rank, world_size):
    model = seeded(Net)
    assert_setup_is_refused(
        world_size, model, lambda n, p: "blocks.0" in n, "ValueError", "blocks.0.norm.weight"
    )
    assert_usable(rank, world_size, model)


@pytest.mark.parametrize("world_size", [2])
def test_embeddings_are_named_in_a_warning(world_size):
    run_ranks(check_embeddings, world_size)


class WithEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Bare(8, 9)])

    def forward(self, x):
        return self.blocks[0](self.embed(x))


def check_embeddings(rank, world_size):
    with pytest.warns(UserWarning, match="embed"):
        dmuon.dedicate_params(
            WithEmbedding(), cpu_mesh(world_size), predicate=lambda n, p: p.ndim == 2
        )


@pytest.mark.parametrize("world_size", [2])
def test_policies_that_fit_nothing_or_are_unknown(world_size):
    run_ranks(check_policies, world_size)


def check_policies(rank, world_size):
    model = seeded(Net)
    for policy, word in (
        ({"overrides": [{"name": "no_such_block", "set": {"route": "adamw"}}]}, "no_such_block"),
        ({"overrides": [{"name": "blocks", "set": {"route": "sgd"}}]}, "sgd"),
        ({"overrides": [{"name": "blocks", "set": {"colour": "red"}}]}, "colour"),
        ({"default": {}}, "default"),
        ({"overrides": [{"name": "blocks", "set": {"view": "diagonal"}}]}, "diagonal"),
    ):
        assert_setup_is_refused(
            world_size, model, in_blocks, "ValueError", word, param_policy=policy
        )
    for option, value in (
        ("owner_strategy", "random"),
        ("owner_cost_model", "guess"),
        ("process_group_policy", "mine"),
        ("tp_buffer_reuse", "both"),
        ("max_owners_per_group", 0),
    ):
        assert_setup_is_refused(
            world_size, model, in_blocks, "ValueError", option, **{option: value}
        )
    assert_usable(rank, world_size, model)


@pytest.mark.parametrize("world_size", [2])
def test_a_boundary_without_an_ancestor_is_refused_by_name(world_size):
    run_ranks(check_boundaries, world_size)


def check_boundaries(rank, world_size):
    model = seeded(Net)
    assert_setup_is_refused(
        world_size,
        model,
        lambda n, p: p.ndim == 2,
        "ValueError",
        "inp.weight",
        hook_boundary_predicate=lambda name, module: name.startswith("blocks."),
    )
    assert_usable(rank, world_size, model)


# F09: the mesh ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [4])
def test_meshes_that_do_not_fit(world_size):
    run_ranks(check_meshes, world_size)


def check_meshes(rank, world_size):
    model = seeded(Net)
    flat = cpu_mesh(world_size)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert_setup_is_refused(world_size, model, in_blocks, "ValueError", "mesh", mesh=square)
    assert_setup_is_refused(
        world_size, model, in_blocks, "ValueError", "mesh", mesh=flat, replicate_mesh=flat
    )
    assert_usable(rank, world_size, model)


@pytest.mark.parametrize("world_size", [4])
def test_a_mesh_without_this_rank(world_size):
    run_ranks(check_foreign_mesh, world_size)
    retire(world_size)


def check_foreign_mesh(rank, world_size):
    """Only the ranks left out are wrong: they raise, and do not hang the others."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    model = seeded(Net)
    if rank in (0, 1):
        dmuon.dedicate_params(model, mesh, predicate=in_blocks)
        shard(model, mesh)
        three_steps(Run(model, dmuon.Muon(model), [rank], 2, managed=True))
    else:
        with pytest.raises(ValueError, match="mesh"):
            dmuon.dedicate_params(model, mesh, predicate=in_blocks)


@pytest.mark.parametrize("world_size", [2])
def test_an_unnamed_mesh_is_fine_without_tensor_parallelism(world_size):
    run_ranks(check_unnamed_mesh, world_size)


def check_unnamed_mesh(rank, world_size):
    model, mesh = seeded(Net), init_device_mesh("cpu", (world_size,))
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    shard(model, mesh)
    three_steps(Run(model, dmuon.Muon(model), [rank], world_size, managed=True))


# F10: the order of calls -------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_in_the_wrong_order(world_size):
    run_ranks(check_order, world_size)


def check_order(rank, world_size):
    mesh, model = cpu_mesh(world_size), seeded(Net)
    shard(model, mesh)
    assert_all_raise(
        lambda: dmuon.dedicate_params(model, mesh, predicate=in_blocks),
        "ValueError",
        "fully_shard",
    )
    inside = seeded(Net)
    by_fsdp1 = FullyShardedDataParallel(seeded(Net), device_id=torch.device("cpu"))
    for wrapped in (DistributedDataParallel(inside), inside, by_fsdp1):
        says = "DataParallel already, which reduces all", "dedicate_params, then fully_shard"
        assert_setup_is_refused(world_size, wrapped, in_blocks, "ValueError", *says)
    twice = seeded(Net)
    dmuon.dedicate_params(twice, mesh, predicate=in_blocks)
    assert_all_raise(
        lambda: dmuon.dedicate_params(twice, mesh, predicate=in_blocks),
        "ValueError",
        "dedicate_params",
    )
    assert_all_raise(lambda: dmuon.Muon(seeded(Net)), "ValueError", "dedicate_params")
    shard(twice, mesh)
    three_steps(Run(twice, dmuon.Muon(twice), [rank], world_size, managed=True))


@pytest.mark.parametrize("world_size", [2])
def test_calls_that_need_a_managed_model(world_size):
    run_ranks(check_unmanaged, world_size)


def check_unmanaged(rank, world_size):
    plain = seeded(Net)
    for call in (
        dmuon.wait_all_reduces,
        dmuon.report,
        dmuon.get_dedicated_params,
        dmuon.ignored_params,
        dmuon.summarize_comm_plan,
    ):
        assert_all_raise(lambda: call(plain), "ValueError", "dedicate_params")  # noqa: B023


@pytest.mark.parametrize("world_size", [2])
def test_a_dedicated_parameter_that_fsdp_took(world_size):
    run_ranks(check_stolen, world_size)


def check_stolen(rank, world_size):
    """The caller's own binding, made while the patch was off, passes a set without ours: refused
    by dmuon at the first forward, or before that by FSDP2, which takes no placeholder."""
    model, mesh = seeded(Net), cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    dmuon.uninstall_patch()
    try:
        with pytest.raises((ValueError, NotImplementedError), match=r"ignored_params|non-contig"):
            shard(model, mesh, ignored_params=set())
            model(torch.randn(3, INPUTS))
    finally:
        dmuon.install_patch()


# F13-F14: tied (F11-F12, F16: test_parity, test_autograd) -----------------------------------------


class Tied(Net):
    def __init__(self):
        super().__init__(dims=((5, 5), (5, 5)))
        self.blocks[0].up.weight = self.head.weight


@pytest.mark.parametrize("world_size", [2])
def test_a_tie_that_is_half_selected_names_both(world_size):
    run_ranks(check_half_tied, world_size)


def check_half_tied(rank, world_size):
    assert_setup_is_refused(
        world_size, seeded(Tied), in_blocks, "ValueError", "blocks.0.up.weight", "head.weight"
    )


# F15: parameters changed after setup ---------------------------------------------------------


@pytest.mark.parametrize("world_size", [2])
def test_a_replaced_parameter_is_found_at_the_next_forward(world_size):
    run_ranks(check_replaced, world_size)


def check_replaced(rank, world_size):
    run = setup(world_size)
    run.train(0)
    old = run.model.blocks[0].up.weight
    run.model.blocks[0].up.weight = nn.Parameter(torch.zeros(29, 17))
    assert_all_raise(lambda: run.loss(1, rank), "ValueError", "blocks.0.up.weight")
    run.model.blocks[0].up.weight = old


@pytest.mark.parametrize("world_size", [2])
def test_a_cast_after_setup_is_refused_or_found(world_size):
    run_ranks(check_cast, world_size)


def check_cast(rank, world_size):
    run = setup(world_size)
    run.train(0)

    def cast_and_train():
        # Of dedicated weights alone: FSDP2 refuses its own first.
        for param in dmuon.get_dedicated_params(run.model):
            param.parameter.data = param.parameter.data.double()
        run.train(1)

    assert_all_raise(cast_and_train, "ValueError", "blocks.")


# F17-F18: odd tensors ----------------------------------------------------------------------------


class Labelled(torch.Tensor):
    """A subclass with data of its own kind; raw pointers must not be taken from it."""


@pytest.mark.parametrize("world_size", [2])
def test_a_tensor_subclass_is_refused_by_name(world_size):
    run_ranks(check_subclass, world_size)


def check_subclass(rank, world_size):
    model = seeded(Net)
    weight = torch.randn(29, 17).as_subclass(Labelled)
    model.blocks[0].up.weight = nn.Parameter(weight)
    assert_all_raise(
        lambda: dmuon.dedicate_params(model, cpu_mesh(world_size), predicate=in_blocks),
        "ValueError",
        "blocks.0.up.weight",
        "Labelled",
    )


@pytest.mark.parametrize("world_size", [2])
def test_parametrised_weights_train_or_are_refused_by_name(world_size):
    run_ranks(check_parametrised, world_size)


def weight_normed():
    model = Net(block=Bare)
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
    return model


def check_parametrised(rank, world_size):
    """The matrix of a weight norm is `original1`; its size vector stays with AdamW."""
    try:
        check_parity(
            rank,
            world_size,
            make_model=weight_normed,
            predicate=lambda n, p: in_blocks(n, p) and min(p.shape) > 1,
        )
    except ValueError as error:
        assert "parametrizations" in str(error)


@pytest.mark.parametrize("world_size", [2])
def test_strides_do_not_matter_and_overlap_is_refused(world_size):
    run_ranks(check_strides, world_size)


def transposed():
    model = Net()
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())
    return model


def check_strides(rank, world_size):
    check_parity(rank, world_size, make_model=transposed)
    model = seeded(Net)
    model.blocks[0].up.weight = nn.Parameter(torch.randn(1, 17).expand(29, 17))
    assert_all_raise(
        lambda: dmuon.dedicate_params(model, cpu_mesh(world_size), predicate=in_blocks),
        "ValueError",
        "blocks.0.up.weight",
    )


# F19: clones -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2])
def test_copies_say_that_they_are_unmanaged_and_leave_the_original_alone(world_size):
    run_ranks(check_copies, world_size)


def check_copies(rank, world_size):
    """Either the copy is refused, or using it is: never a quiet model of placeholders."""
    torch.manual_seed(7)
    model, mesh = Net(), cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=in_blocks)
    for make_copy in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=r"dmuon|cannot pickle"):
            make_copy(model)(torch.randn(3, INPUTS))
    shard(model, mesh)
    three_steps(Run(model, dmuon.Muon(model), [rank], world_size, managed=True))


# Tensor parallelism that is not named --------------------------------------------------------


@pytest.mark.parametrize("world_size", [4])
def test_a_tensor_parallel_weight_on_an_unnamed_mesh(world_size):
    run_ranks(check_unnamed_tp, world_size)


def check_unnamed_tp(rank, world_size):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp = DeviceMesh.from_group(rows[rank // 2], "cpu")
    dp = DeviceMesh.from_group(columns[rank % 2], "cpu")
    model = Net(dims=((16, 32), (16, 32)))
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"(?s)blocks\.0\.up\.weight.*mesh_dim_names"):
        dmuon.dedicate_params(model, dp, predicate=in_blocks)

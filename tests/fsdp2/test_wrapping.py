"""However fully_shard is reached, it leaves dedicated parameters alone; its setters reach them."""

import functools

import dmuon
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp import fully_shard as another_name
from torch.distributed.tensor import DTensor

from tests.support.models import Bare, Net, in_blocks, shard
from tests.support.parity import (
    Run,
    assert_same,
    check_parity,
    clean_name,
    cpu_mesh,
    full_weights,
    setup,
    three_steps,
    total,
)
from tests.support.ranks import run_fresh, run_ranks

early_partial = functools.partial(fully_shard, reshard_after_forward=True)

# How fully_shard is called ---------------------------------------------------------------------


def by_another_name(model, mesh):
    for block in model.blocks:
        another_name(block, mesh=mesh)
    another_name(model, mesh=mesh)


def by_an_early_partial(model, mesh):
    for block in model.blocks:
        early_partial(block, mesh=mesh)
    early_partial(model, mesh=mesh)


def by_the_composable_module(model, mesh):
    from torch.distributed._composable.fsdp import fully_shard as composable

    for block in model.blocks:
        composable(block, mesh=mesh)
    composable(model, mesh=mesh)


def with_the_explicit_set(model, mesh):
    shard(model, mesh, ignored_params=dmuon.ignored_params(model))


def with_a_union_of_sets(model, mesh):
    """The caller's own set and ours; what he ignores is frozen here, so that nothing trains it."""
    model.inp.bias.requires_grad_(False)
    shard(model, mesh, ignored_params=dmuon.ignored_params(model) | {model.inp.bias})


def with_an_own_set_only(model, mesh):
    """A caller who knows nothing of dmuon and passes his own set, through the module attribute."""
    model.inp.bias.requires_grad_(False)
    for block in model.blocks:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh, ignored_params={model.inp.bias})
    torch.distributed.fsdp.fully_shard(model, mesh=mesh, ignored_params={model.inp.bias})


def nested(model, mesh):
    """A fully_shard inside a block, one around it, one around all."""
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def several_blocks_as_one(model, mesh):
    fully_shard(list(model.blocks), mesh=mesh)
    fully_shard(model, mesh=mesh)


WRAPPINGS = [
    by_another_name,
    by_an_early_partial,
    by_the_composable_module,
    with_the_explicit_set,
    with_a_union_of_sets,
    with_an_own_set_only,
    nested,
    several_blocks_as_one,
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_way_to_call_fully_shard(world_size):
    run_ranks(check_wrappings, world_size, limit_s=60.0)


def check_wrappings(rank, world_size):
    for wrap in WRAPPINGS:
        frozen = wrap in (with_a_union_of_sets, with_an_own_set_only)
        run = check_parity(
            rank, world_size, two_steps, wrap=wrap, prepare=freeze_inp_bias if frozen else None
        )
        assert_dedicated_are_plain(run.model)


def two_steps(run):
    for step in range(2):
        run.train(step)


def freeze_inp_bias(run):
    run.model.inp.bias.requires_grad_(False)


def assert_dedicated_are_plain(model):
    names = {clean_name(p.fqn) for p in dmuon.get_dedicated_params(model)}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) != (clean_name(name) in names) or name == "inp.bias", name


DMUON_FIRST = """
import dmuon
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
dmuon.dedicate_params(model, mesh, predicate=lambda n, p: p.ndim == 2)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
kinds = [type(p).__name__ for p in model.parameters()]
assert kinds == ["Parameter", "DTensor"] * 2, kinds
print(dmuon.report(model)["ns_calls"])
dist.destroy_process_group()
"""


def test_dmuon_imported_before_fully_shard():
    """In new processes; those of the pool have imported fully_shard long before dmuon."""
    out = run_fresh(DMUON_FIRST, 2)
    assert sum(int(text) for text in out) == 2, "one NS call per matrix"


@pytest.mark.parametrize("world_size", [2])
def test_the_patch_comes_and_goes(world_size):
    run_ranks(check_patch, world_size)


def check_patch(rank, world_size):
    """Idempotent both ways; without it, the explicit set still works and its lack is an error."""
    dmuon.install_patch()
    dmuon.install_patch()
    dmuon.uninstall_patch()
    dmuon.uninstall_patch()
    try:
        assert not fully_shard.__wrapped__.__kwdefaults__["ignored_params"]
        check_parity(rank, world_size, two_steps, wrap=with_the_explicit_set)
        with pytest.raises((ValueError, NotImplementedError), match=r"blocks\.0|non-contig"):
            setup(world_size).train(0)  # FSDP2 itself takes no placeholder
    finally:
        dmuon.install_patch()
    check_parity(rank, world_size, two_steps)


# The public setters of FSDPModule --------------------------------------------------------------


def set_on_all(model, name, *args, **options):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            getattr(module, name)(*args, **options)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradient_divide_factor(world_size):
    run_ranks(check_divide_factor, world_size)


def check_divide_factor(rank, world_size):
    """Factor 1 makes gradients sums; AdamW's route and the clipping norm show it."""
    check_parity(rank, world_size, summed_gradients, prepare=sum_gradients)


def sum_gradients(run):
    if run.managed:
        set_on_all(run.model, "set_gradient_divide_factor", 1.0)
        set_on_all(run.model, "set_force_sum_reduction_for_comms", True)  # all that gloo can do


def summed_gradients(run):
    """The factor that makes means of sums, written out: the oracle's sum is the job's sum."""
    for step in range(3):
        for rank in run.ranks:
            x, y = run.batch(step, rank)
            F.mse_loss(run.model(x), y).backward()
        run.losses.append(float(run.clip(0.5)))
        run.step()


@pytest.mark.parametrize("world_size", [2])
def test_gradient_divide_factor_of_the_root_is_not_that_of_its_blocks(world_size):
    run_ranks(check_root_factor, world_size)


def check_root_factor(rank, world_size):
    """As in FSDP2, whose setter does not recurse; the clipping norm shows it."""
    check_parity(rank, world_size, summed_outside_of_blocks, prepare=sum_gradients_of_root)


def sum_gradients_of_root(run):
    if run.managed:
        run.model.set_gradient_divide_factor(1.0)
        set_on_all(run.model, "set_force_sum_reduction_for_comms", True)


def summed_outside_of_blocks(run):
    for step in range(3):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        if not run.managed:
            for name, p in run.model.named_parameters():
                if "blocks" not in name:
                    p.grad *= run.world_size
        run.losses.append(float(run.clip(0.5)))
        run.step()


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradient_sync_flag(world_size):
    run_ranks(check_gradient_sync, world_size)


def check_gradient_sync(rank, world_size):
    for recurse in (True, False):
        check_parity(rank, world_size, accumulate_by_flag(recurse))


def accumulate_by_flag(recurse):
    def script(run):
        for step in range(2):
            for rank in run.ranks:
                set_sync(run, False, recurse)
                run.loss(10 + step, rank).backward()
                run.loss(20 + step, rank).backward()
                set_sync(run, True, recurse)
                run.loss(step, rank).backward()
            run.step()

    return script


def set_sync(run, value, recurse):
    if not run.managed:
        return
    if recurse:
        run.model.set_requires_gradient_sync(value)
    else:
        set_on_all(run.model, "set_requires_gradient_sync", value, recurse=False)


@pytest.mark.parametrize("world_size", [2])
def test_reshard_flags_and_last_backward(world_size):
    run_ranks(check_reshard_flags, world_size)


def check_reshard_flags(rank, world_size):
    """As torchtitan's chunked loss: the flags change in the middle of a step."""
    check_parity(rank, world_size, flags_in_the_middle, make_model=lambda: Net(block=Bare))


def flags_in_the_middle(run):
    for step in range(3):
        for rank in run.ranks:
            flag(run, "set_is_last_backward", False)
            flag(run, "set_reshard_after_backward", False)
            flag(run, "set_requires_gradient_sync", False)
            run.loss(10 + step, rank).backward()
            flag(run, "set_is_last_backward", True)
            flag(run, "set_reshard_after_backward", True)
            flag(run, "set_requires_gradient_sync", True)
            run.loss(step, rank).backward()
        run.step()


def flag(run, name, value):
    if run.managed:
        getattr(run.model, name)(value)


@pytest.mark.parametrize("world_size", [2])
def test_reshard_after_forward_at_run_time(world_size):
    run_ranks(check_run_time_reshard, world_size)


def check_run_time_reshard(rank, world_size):
    for first in (True, False):
        check_parity(rank, world_size, toggled_reshard(first))


def toggled_reshard(first):
    def script(run):
        for step in range(3):
            flag(run, "set_reshard_after_forward", first == (step % 2 == 0))
            run.train(step)
        flag(run, "set_reshard_after_forward", True)
        run.train(3)

    return script


@pytest.mark.parametrize("world_size", [2])
def test_unshard_and_reshard_by_hand(world_size):
    run_ranks(check_unshard, world_size)


def check_unshard(rank, world_size):
    check_parity(rank, world_size, unshard_by_hand)


def unshard_by_hand(run):
    for step in range(2):
        if run.managed:
            for block in run.model.blocks:
                block.unshard()
            run.model.blocks[0].reshard()
        run.train(step)


# Forward methods and torch.compile -------------------------------------------------------------


class Generates(Net):
    def generate(self, x):
        return self(x).cumsum(0)

    def forward_block(self, x):
        return self.blocks[0].inner(self.inp(x))


class WithMethod(Bare):
    def inner(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_registered_forward_methods(world_size):
    run_ranks(check_forward_methods, world_size)


def check_forward_methods(rank, world_size):
    check_parity(
        rank,
        world_size,
        by_methods,
        make_model=lambda: Generates(block=WithMethod),
        wrap=shard_with_methods,
    )


def shard_with_methods(model, mesh):
    shard(model, mesh)
    register_fsdp_forward_method(model, "generate")
    register_fsdp_forward_method(model, "forward_block")
    for block in model.blocks:
        register_fsdp_forward_method(block, "inner")


def by_methods(run):
    for step in range(3):
        for rank in run.ranks:
            x, _ = run.batch(step, rank)
            with torch.no_grad():
                run.losses.append(run.scale * run.model.generate(x).square().mean().item())
            (run.scale * run.model.forward_block(x).square().mean()).backward()
            run.loss(step, rank).backward()
        run.step()


@pytest.mark.parametrize("world_size", [2, 4])
def test_compiled_blocks(world_size):
    """The eager backend traces like the others; a graph break would raise."""
    run_ranks(check_compiled_blocks, world_size, limit_s=120.0)


def check_compiled_blocks(rank, world_size):
    for compile_first in (True, False):
        torch._dynamo.reset()
        check_parity(rank, world_size, two_steps, wrap=compiled(compile_first))
    counters = torch._dynamo.utils.counters["graph_break"]
    assert not counters, f"graph breaks: {dict(counters)}"


def compiled(compile_first):
    def wrap(model, mesh):
        if not compile_first:
            shard(model, mesh)
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        if compile_first:
            shard(model, mesh)

    return wrap


@pytest.mark.parametrize("world_size", [2])
def test_a_compiled_wrapper_around_each_block(world_size):
    run_ranks(check_compile_wrapper, world_size, limit_s=120.0)


def check_compile_wrapper(rank, world_size):
    """`torch.compile(block)` adds `_orig_mod.` to the names; ours stay clean."""
    torch._dynamo.reset()
    run = setup(world_size, make_model=compiled_net)
    names = {p.fqn for p in dmuon.get_dedicated_params(run.model)}
    assert not any("_orig_mod" in name for name in names), names
    three_steps(run)
    assert total(dmuon.report(run.model)["ns_calls"]) == 3 * 4


def compiled_net():
    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    return model


# Clones ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2])
def test_a_model_without_managed_blocks_is_left_alone(world_size):
    run_ranks(check_other_model, world_size)


def check_other_model(rank, world_size):
    """Two models in one process; FSDP2 and AdamW on the second work as if dmuon were not there."""
    run = setup(world_size)
    other, mesh = Net(), cpu_mesh(world_size)
    shard(other, mesh)
    assert all(isinstance(p, DTensor) for p in other.parameters())
    adamw = torch.optim.AdamW(other.parameters())
    for step in range(2):
        x, y = run.batch(step, rank)
        F.mse_loss(other(x), y).backward()
        run.train(step)
        adamw.step()
        adamw.zero_grad()


@pytest.mark.parametrize("world_size", [2])
def test_two_managed_models_do_not_disturb_each_other(world_size):
    run_ranks(check_two_models, world_size)


def check_two_models(rank, world_size):
    other = setup(world_size)

    def script(run):
        for step in range(3):
            run.train(step)
            if run.managed:
                other.train(step)

    check_parity(rank, world_size, script)


def test_a_slice_of_a_named_mesh_is_as_good_as_the_mesh():
    run_ranks(check_slice, 2)


def check_slice(rank, world_size):
    whole = setup(world_size)
    torch.manual_seed(7)
    model, mesh = Net(), cpu_mesh(world_size)["dp"]
    dmuon.dedicate_params(model, mesh, in_blocks)
    shard(model, mesh)
    sliced = Run(model, dmuon.Muon(model), [rank], world_size, managed=True)
    for run in (whole, sliced):
        three_steps(run)
    assert_same(full_weights(sliced.model), full_weights(whole.model))


def test_in_blocks_selects_what_the_tests_think():
    names = [n for n, p in Net().named_parameters() if in_blocks(n, p)]
    assert names == [f"blocks.{i}.{m}.weight" for i in (0, 1) for m in ("up", "down")]
    assert isinstance(Net().blocks, nn.ModuleList)

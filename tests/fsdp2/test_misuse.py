"""Models and calls that nobody planned for: right numbers, or a refusal by name on every rank."""

import dmuon
import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.models import INPUTS, Bare, Block, Net
from tests.support.parity import assert_all_raise, assert_same, check_parity, cpu_mesh, setup
from tests.support.ranks import run_ranks

# Only matrices, all of them dedicated: FSDP2's own gradients have no part in the accumulation.
BARE = {
    "make_model": lambda: Net(block=Bare),
    "predicate": lambda name, param: param.ndim >= 2,
    "muon": {"adamw_lr": 0.0, "adamw_weight_decay": 0.0},
    "count_ns": False,
}


class ResidualBlock(Block):
    def forward(self, x, residual):
        residual = x + residual
        return self.down(torch.tanh(self.up(self.norm(residual)))), residual


class ResidualNet(Net):
    def __init__(self):
        super().__init__(block=ResidualBlock)

    def forward(self, x):
        x = self.inp(x)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(x + residual)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_block_that_also_returns_the_residual_stream(world_size):
    run_ranks(check_residual, world_size)


def check_residual(rank, world_size):
    run = check_parity(rank, world_size, make_model=ResidualNet)
    bytes_ = dmuon.report(run.model)["materialisations"]
    assert bytes_ == 3 * 2 * 2, "a unit is fetched once for forward and once for backward"


class Holder:
    __slots__ = ("__value",)  # kept under another name than it is given

    def __init__(self, value):
        self.__value = value

    def __call__(self):
        return self.__value


class Hidden(Holder):
    """Its tensor is in a slot of the class above, which ``Hidden.__slots__`` does not name."""

    __slots__ = ("comment",)


class HidingBlock(Bare):
    def forward(self, x):
        y = super().forward(x)
        return y.mean(), {Hidden(y)}

    __hash__ = nn.Module.__hash__


class HidingNet(Net):
    def __init__(self):
        super().__init__(block=HidingBlock)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            (hidden,) = block(x)[1]
            x = hidden()
        return self.head(x)


@pytest.mark.parametrize("world_size", [2])
def test_outputs_in_slots_sets_and_callables(world_size):
    run_ranks(check_hidden, world_size)


def check_hidden(rank, world_size):
    check_parity(rank, world_size, make_model=HidingNet)


class FrozenEarly(nn.Module):
    """Matrices on the root: used before and after the blocks, and the early one is frozen."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(24, 17)
        self.early = nn.Parameter(torch.randn(17, 17) / 4)
        self.blocks = nn.ModuleList(Block(17, 29) for _ in range(2))
        self.late = nn.Parameter(torch.randn(17, 17) / 4)
        self.head = nn.Linear(17, 20)

    def forward(self, x):
        x = self.inp(x) @ self.early
        for block in self.blocks:
            x = block(x)
        return self.head(x @ self.late)


@pytest.mark.parametrize("world_size", [2])
def test_a_unit_around_others_with_a_frozen_matrix(world_size):
    run_ranks(check_frozen_early, world_size)


def check_frozen_early(rank, world_size):
    check_parity(
        rank,
        world_size,
        make_model=FrozenEarly,
        predicate=lambda name, _: (
            name in ("early", "late")
            or ("blocks" in name and "weight" in name and "norm" not in name)
        ),
        prepare=lambda run: run.model.early.requires_grad_(False),
        count_ns=False,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_changed_between_accumulating_passes(world_size):
    run_ranks(check_changed, world_size)


def check_changed(rank, world_size):
    for change in (replaced, scaled, cleared):
        check_parity(rank, world_size, accumulate_with(change), **BARE)


def accumulate_with(change):
    """A pass that reduces, one that does not, a change by the user, a pass that reduces."""

    def script(run):
        for step in range(2):
            backward(run, step)
            with run.no_sync():
                backward(run, 10 + step)
            change(run)
            backward(run, 20 + step)
            run.step()

    return script


def backward(run, step):
    for rank in run.ranks:
        run.loss(step, rank).backward()


def replaced(run):
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad = p.grad * 0.5


def scaled(run):
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def cleared(run):
    run.optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_wrong_on_one_rank_is_raised_on_all(world_size):
    run_ranks(check_one_rank, world_size)


def check_one_rank(rank, world_size):
    run = setup(world_size)
    bad = rank == world_size - 1
    remake = {"lr": -1.0 if bad else 0.02}
    assert_all_raise(lambda: dmuon.Muon(run.model, **remake), "ValueError", "lr", "-1.0")
    run.train(0)
    for key, value in (("lr", float("nan")), ("momentum", 1.5), ("weight_decay", -1.0)):
        group = run.optimizer.param_groups[0]
        good, group[key] = group[key], value if bad else group[key]
        backward(run, 1)
        assert_all_raise(run.step, "ValueError", key, str(value), f"rank {world_size - 1}")
        group[key] = good
    run.step()
    options = {"process_group_policy": "x" if bad else "isolated"}
    model, mesh = Net(), cpu_mesh(world_size)
    assert_all_raise(
        lambda: dmuon.dedicate_params(model, mesh, lambda n, p: "up" in n, **options),
        "ValueError",
        "process_group_policy",
        "'x'",
    )


@pytest.mark.parametrize("world_size", [2])
def test_refusals_by_name(world_size):
    run_ranks(check_refusals, world_size)


def check_refusals(rank, world_size):
    mesh = cpu_mesh(world_size)
    part = Net()
    dmuon.dedicate_params(part.blocks, mesh, lambda n, p: "up" in n and p.ndim == 2)
    assert_all_raise(lambda: dmuon.Muon(part), "ValueError", "part", "ModuleList")

    written = setup(world_size)
    with torch.no_grad():
        written.model.blocks[0].up.weight.zero_()
    assert_all_raise(lambda: written.loss(0, rank), "ValueError", "blocks.0.up.weight", "in place")

    mixed = {"overrides": [{"name": "up", "set": {"param_dtype": "bfloat16"}}]}
    assert_all_raise(
        lambda: dmuon.dedicate_params(
            Net(), mesh, lambda n, p: "blocks" in n and p.ndim == 2, param_policy=mixed
        ),
        "ValueError",
        "blocks.0.down.weight",
        "param_dtype",
    )
    sparse = nn.Sequential(nn.Embedding(9, 5, sparse=True))
    assert_all_raise(
        lambda: dmuon.dedicate_params(sparse, mesh, lambda n, p: True),
        "ValueError",
        "0.weight",
        "sparse",
    )


@pytest.mark.parametrize("world_size", [2])
def test_a_first_step_while_fsdp2_holds_whole_parameters(world_size):
    run_ranks(check_whole_at_first_step, world_size)


def check_whole_at_first_step(rank, world_size):
    check_parity(rank, world_size, unsharded, count_ns=False)


def unsharded(run):
    """FSDP2 keeps its root whole after a forward without backward: its slots hold other objects."""
    backward(run, 0)
    with torch.no_grad():
        run.model(run.batch(1, run.ranks[0])[0])
    run.step()
    if run.managed:
        run.model.reshard()


@pytest.mark.parametrize("world_size", [2])
def test_global_step_hooks_run_once(world_size):
    run_ranks(check_global_hooks, world_size)


def check_global_hooks(rank, world_size):
    seen = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append(type(optimizer).__name__)
    )
    run = setup(world_size)
    run.train(0)
    handle.remove()
    assert seen == ["Muon"]


@pytest.mark.parametrize("world_size", [2])
def test_of_two_optimizers_the_last_one_steps(world_size):
    run_ranks(check_two, world_size)


def check_two(rank, world_size):
    run = setup(world_size)
    last = dmuon.Muon(run.model)
    run.loss(0, rank).backward()
    before = dmuon.get_model_state_dict(run.model, rank0_only=False)
    assert_all_raise(run.optimizer.step, "ValueError", "another dmuon.Muon", "the last one made")
    assert_same(dmuon.get_model_state_dict(run.model, rank0_only=False), before)
    last.step()
    del last
    assert_all_raise(run.optimizer.step, "ValueError", "another dmuon.Muon")


@pytest.mark.parametrize("world_size", [2])
def test_clipping_in_two_halves_is_refused(world_size):
    run_ranks(check_halves, world_size)


def check_halves(rank, world_size):
    """The norm of the first half has seen the gradients of this rank's own matrices alone."""
    run = setup(world_size)
    run.loss(0, rank).backward()
    parameters = list(run.model.parameters())
    assert_all_raise(
        lambda: nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.tensor(2.0)),
        "ValueError",
        "get_total_norm",
        "dmuon.clip_grad_norm_(optimizer, max_norm)",
    )


@pytest.mark.parametrize("world_size", [2])
def test_clipping_by_no_norm_is_refused_on_every_rank(world_size):
    run_ranks(check_no_norm, world_size)


def check_no_norm(rank, world_size):
    """Also where a rank has no gradient to take a norm of; and nothing is scaled."""
    run = setup(world_size)
    run.loss(0, rank).backward()
    before = gradients_of(run)
    for order in (-1, float("nan")):
        assert_all_raise(
            lambda p=order: dmuon.clip_grad_norm_(run.optimizer, 1.0, norm_type=p),
            "ValueError",
            "norm_type is",
            "at least 0",
        )
    for largest in (-1.0, float("nan")):
        assert_all_raise(
            lambda m=largest: nn.utils.clip_grad_norm_(run.model.parameters(), m),
            "ValueError",
            "max_norm is",
            "at least 0",
        )
    assert_all_raise(  # on one rank alone
        lambda: dmuon.clip_grad_norm_(run.optimizer, -1.0 if rank else 1.0),
        "ValueError",
        "max_norm is -1",
    )
    for was, now in zip(before, gradients_of(run), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize("world_size", [2])
def test_clipping_by_another_norm_on_each_rank_ends_at_the_step(world_size):
    run_ranks(check_other_norms, world_size)


def check_other_norms(rank, world_size):
    run = setup(world_size)
    before = dmuon.get_model_state_dict(run.model, rank0_only=False)
    for norm in ({"max_norm": 1.0 + rank}, {"max_norm": 1.0, "norm_type": 1.0 + rank}):
        run.loss(0, rank).backward()
        dmuon.clip_grad_norm_(run.optimizer, **norm)
        assert_all_raise(run.optimizer.step, "ValueError", "clipped by other norms")
        run.optimizer.zero_grad()
    assert_same(dmuon.get_model_state_dict(run.model, rank0_only=False), before)
    run.loss(0, rank).backward()
    dmuon.clip_grad_norm_(run.optimizer, 1.0)
    run.optimizer.step()


def gradients_of(run):
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    return [getattr(g, "_local_tensor", g).clone() for g in gradients]


@pytest.mark.parametrize("world_size", [2])
def test_clipping_by_value(world_size):
    run_ranks(check_values, world_size)


def check_values(rank, world_size):
    run = check_parity(rank, world_size, clipped_by_value)
    run.loss(0, rank).backward()
    nn.utils.clip_grad_value_(run.model.parameters(), 1e-5)
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    largest = [getattr(g, "to_local", lambda g=g: g)().abs().max() for g in gradients]
    assert max(largest).item() == pytest.approx(1e-5)


@pytest.mark.parametrize("world_size", [2])
def test_clipping_by_value_where_a_rank_owns_nothing(world_size):
    run_ranks(check_values_of_one, world_size)


def check_values_of_one(rank, world_size):
    model, mesh = Net(), cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, lambda name, p: name == "blocks.0.up.weight")
    fully_shard(model, mesh=mesh)
    dmuon.Muon(model)
    model(torch.ones(3, INPUTS)).sum().backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-5)
    matrix = dict(model.named_parameters())["blocks.0.up.weight"]
    nn.utils.clip_grad_value_(matrix, 1e-6)
    if matrix.grad is not None:
        assert matrix.grad.abs().max().item() == pytest.approx(1e-6)


def clipped_by_value(run):
    """So low that it changes the direction of most gradients."""
    for step in range(3):
        backward(run, step)
        nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)
        run.step()


@pytest.mark.parametrize("world_size", [2])
def test_an_optimizer_that_is_not_dmuons(world_size):
    run_ranks(check_other_optimizer, world_size)


def check_other_optimizer(rank, world_size):
    """It would write into placeholders; under DDP into each owner's copy, and the ranks would part."""
    mesh, sharded, replicated = cpu_mesh(world_size), Net(), Net()
    matrices = lambda name, p: "blocks" in name and p.ndim == 2  # noqa: E731
    dmuon.dedicate_params(sharded, mesh, matrices)
    fully_shard(sharded, mesh=mesh)
    dmuon.dedicate_params_ddp(replicated, mesh, matrices)
    dmuon.replicate(replicated, mesh)
    for model in (sharded, replicated):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(3, INPUTS)).sum().backward()
        before = dmuon.get_model_state_dict(model, rank0_only=False)
        says = "this AdamW has the dedicated parameters 'blocks.0", "Use dmuon.Muon(model)"
        assert_all_raise(optimizer.step, "ValueError", *says)
        assert_same(dmuon.get_model_state_dict(model, rank0_only=False), before)
        compiled = torch.compile(optimizer.step, backend="eager")
        assert_all_raise(compiled, "ValueError", "this AdamW has the dedicated parameters")
        assert_same(dmuon.get_model_state_dict(model, rank0_only=False), before)
        rest = [p for p in model.parameters() if not hasattr(p, "_dedicated_owner_rank")]
        torch.optim.AdamW(rest, foreach=False).step()


class Many(torch.optim.Optimizer):
    """A container by name; it has the parameters of what it holds."""

    def __init__(self, **optimizers):
        super().__init__(
            [p for o in optimizers.values() for g in o.param_groups for p in g["params"]], {}
        )
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers.values():
            optimizer.step()


@pytest.mark.parametrize("world_size", [2])
def test_a_container_steps_what_it_holds(world_size):
    run_ranks(check_container, world_size)


def check_container(rank, world_size):
    run, plain = setup(world_size), nn.Linear(3, 3)
    adamw = torch.optim.AdamW(plain.parameters())
    run.loss(0, rank).backward()
    plain(torch.ones(3)).sum().backward()
    Many(muon=run.optimizer, adamw=adamw).step()
    alone = Many(adamw=adamw)
    alone.add_param_group({"params": [dmuon.get_dedicated_params(run.model)[0].parameter]})
    assert_all_raise(alone.step, "ValueError", "this Many has the dedicated parameters")

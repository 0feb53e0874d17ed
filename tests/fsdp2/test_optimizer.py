"""dmuon.Muon is a torch.optim.Optimizer: groups, schedulers, hooks, closures, scaler, state."""

import copy
from functools import partial

import dmuon
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from tests.support.models import Net
from tests.support.parity import (
    assert_all_raise,
    assert_same,
    check_parity,
    full_weights,
    setup,
    three_steps,
)
from tests.support.ranks import run_ranks

# Learning rates --------------------------------------------------------------------------------

SCHEDULERS = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.7),
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "multi_step": lambda o: schedulers.MultiStepLR(o, [1, 3], 0.5),
    "constant": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "linear": lambda o: schedulers.LinearLR(o, 0.2, total_iters=3),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.8),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 5, 2.0),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "warm_restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.02, 2, cycle_momentum=False),
    "one_cycle": lambda o: schedulers.OneCycleLR(
        o, [0.02, 1e-3], total_steps=6, cycle_momentum=False
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@pytest.mark.parametrize("kind", list(SCHEDULERS))
def test_every_scheduler_of_torch(kind):
    run_ranks(check_scheduler, 2, kind)


def check_scheduler(rank, world_size, kind):
    check_parity(rank, world_size, scheduled(kind))


def scheduled(kind):
    def script(run):
        scheduler = SCHEDULERS[kind](run.optimizer)
        for step in range(4):
            run.train(step)
            scheduler.step(*([1.0] if kind == "plateau" else []))
        run.losses += [float(g["lr"]) for g in run.optimizer.param_groups]

    return script


@pytest.mark.parametrize("world_size", [2, 4])
def test_live_and_tensor_learning_rates(world_size):
    run_ranks(check_learning_rates, world_size)


def check_learning_rates(rank, world_size):
    check_parity(rank, world_size, changed_by_hand)
    check_parity(rank, world_size, changed_by_hand, muon={"lr": torch.tensor(0.02)})


def changed_by_hand(run):
    for step, factor in enumerate([1.0, 0.5, 0.1, 2.0]):
        for group in run.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor
        run.train(step)


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_bad_learning_rate_is_refused_on_all_ranks(value):
    run_ranks(check_bad_lr, 2, value)


def check_bad_lr(rank, world_size, value):
    run = setup(world_size)
    assert_all_raise(lambda: dmuon.Muon(run.model, lr=value), "ValueError", "lr")


# Groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2])
def test_default_groups_and_their_names(world_size):
    run_ranks(check_default_groups, world_size)


def check_default_groups(rank, world_size):
    run = setup(world_size, muon={"lr": 0.03, "adamw_lr": 1e-4})
    assert isinstance(run.optimizer, torch.optim.Optimizer)
    groups = {g["group_name"]: g for g in run.optimizer.param_groups}
    assert list(groups) == ["default/muon", "default/adamw"]
    assert (groups["default/muon"]["lr"], groups["default/adamw"]["lr"]) == (0.03, 1e-4)
    grouped = [p for g in run.optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in run.model.parameters()}
    assert len(grouped) == len({id(p) for p in grouped})
    everything = setup(
        world_size, make_model=only_matrices, predicate=lambda n, p: True, wrap=lambda m, mesh: None
    )
    assert [g["group_name"] for g in everything.optimizer.param_groups] == ["default/muon"]


def only_matrices():
    return torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))


@pytest.mark.parametrize("world_size", [2, 3])
def test_param_groups_are_lowered_by_route(world_size):
    run_ranks(check_param_groups, world_size)


def check_param_groups(rank, world_size):
    """Two groups that each hold matrices and others, with rates of their own."""
    run = setup(world_size)
    slow = list(run.model.blocks[0].parameters())
    rest = [p for p in run.model.parameters() if not any(p is q for q in slow)]
    optimizer = dmuon.Muon(
        run.model,
        param_groups=[
            {
                "params": slow,
                "group_name": "slow",
                "muon_lr": 0.001,
                "adamw_lr": 1e-5,
                "muon_weight_decay": 0.2,
                "momentum": 0.5,
            },
            {"params": rest, "group_name": "rest", "lr": 0.01},
        ],
    )
    groups = {g["group_name"]: g for g in optimizer.param_groups}
    assert set(groups) == {"slow/muon", "slow/adamw", "rest/muon", "rest/adamw"}
    assert (groups["slow/muon"]["lr"], groups["slow/adamw"]["lr"]) == (0.001, 1e-5)
    assert len(groups["slow/muon"]["params"]) == 2
    before = full_weights(run.model)
    run.optimizer = optimizer
    for name in ("slow/muon", "slow/adamw"):
        groups[name]["lr"] = 0.0
    run.train(0)
    changed = {n for n, w in full_weights(run.model).items() if not torch.equal(w, before[n])}
    assert changed == {n for n in before if not n.startswith("blocks.0.")}


@pytest.mark.parametrize("world_size", [2])
def test_bad_param_groups_are_refused_by_name(world_size):
    run_ranks(check_bad_groups, world_size)


def check_bad_groups(rank, world_size):
    run = setup(world_size)
    everything = list(run.model.parameters())
    missing = [p for p in everything if p is not run.model.blocks[1].up.weight]
    for groups, words in (
        ([{"params": missing}], ["blocks.1.up.weight"]),
        (
            [{"params": everything}, {"params": [run.model.blocks[0].up.weight]}],
            ["blocks.0.up.weight"],
        ),
        ([{"params": [*everything, torch.nn.Parameter(torch.zeros(2))]}], []),
        ([{"params": everything, "learning_rate": 1.0}], ["learning_rate"]),
    ):
        assert_all_raise(partial(dmuon.Muon, run.model, param_groups=groups), "ValueError", *words)
    three_steps(run)


# Hooks, closures, state ------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2])
def test_step_hooks_and_closures(world_size):
    run_ranks(check_hooks, world_size)


def check_hooks(rank, world_size):
    calls = []
    check_parity(rank, world_size, with_closure)
    run = setup(world_size)
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    run.train(0)
    assert calls == ["pre", "post"]


def with_closure(run):
    for step in range(3):
        run.losses.append(float(run.optimizer.step(closure(run, step))))
        run.steps += 1


def closure(run, step):
    def call():
        run.optimizer.zero_grad()
        losses = [run.loss(step, rank) for rank in run.ranks]
        for loss in losses:
            loss.backward()
        return sum(losses)

    return call


@pytest.mark.parametrize("world_size", [2, 4])
def test_state_dict_round_trip_continues_bit_for_bit(world_size):
    run_ranks(check_round_trip, world_size)


def check_round_trip(rank, world_size):
    run = setup(world_size)
    three_steps(run)
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = full_weights(run.model)
    run.train(3)
    want = full_weights(run.model)
    other = setup(world_size, make_model=lambda: loaded(weights))
    other.optimizer.load_state_dict(saved)
    other.train(3)
    assert_same(full_weights(other.model), want)


def loaded(weights):
    model = Net()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("world_size", [2])
def test_optimizer_state_is_only_on_owners(world_size):
    run_ranks(check_state_on_owners, world_size)


def check_state_on_owners(rank, world_size):
    run = setup(world_size)
    three_steps(run)
    dedicated = {id(p): name for name, p in run.model.named_parameters()}
    owned = {p.fqn for p in dmuon.get_owned_params(run.model, rank)}
    names = {p.fqn for p in dmuon.get_dedicated_params(run.model)}
    for p, state in run.optimizer.state.items():
        name = dedicated[id(p)]
        if name in names - owned:
            big = [
                v
                for v in state.values()
                if isinstance(v, torch.Tensor)
                and not isinstance(v, dmuon.OwnedTensor)
                and v.untyped_storage().nbytes() > 16
            ]
            assert not big, f"{name}: state on a rank that does not own it"
        elif name in owned:
            assert any(
                isinstance(v, torch.Tensor) and v.shape == p.shape and v.abs().sum() > 0
                for v in state.values()
            ), f"{name}: no momentum on its owner"


# Gradient scaler and non-finite gradients --------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_grad_scaler_works_or_is_refused_by_name(world_size):
    run_ranks(check_grad_scaler, world_size)


def check_grad_scaler(rank, world_size):
    run, plain = setup(world_size), setup(world_size)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    try:
        for step in range(3):
            scaler.scale(run.loss(step, rank)).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
    except RuntimeError as error:
        assert "GradScaler" in str(error)
        return
    three_steps(plain)
    want, got = full_weights(plain.model), full_weights(run.model)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
    check_scaler_skips(run, scaler, rank)


def check_scaler_skips(run, scaler, rank):
    """An overflow on one rank skips the step on all, and halves the scale."""
    before, scale = full_weights(run.model), scaler.get_scale()
    factor = float("inf") if rank == 1 else 1.0
    scaler.scale(run.loss(4, rank) * factor).backward()
    scaler.step(run.optimizer)
    scaler.update()
    assert_same(full_weights(run.model), before)
    assert scaler.get_scale() == scale / 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_nan_on_one_rank_is_named_on_all_and_nothing_changes(world_size):
    run_ranks(check_nan, world_size)


def check_nan(rank, world_size):
    run = setup(world_size)
    three_steps(run)
    before, state = full_weights(run.model), momentum(run)
    poison(run, rank, world_size - 1)
    assert_all_raise(run.optimizer.step, "RuntimeError", "blocks.")
    assert_same(full_weights(run.model), before)
    assert all(torch.equal(a, b) for a, b in zip(momentum(run), state, strict=True))
    run.optimizer.zero_grad()
    run.train(4)
    assert all(torch.isfinite(w).all() for w in full_weights(run.model).values())


def momentum(run):
    return [
        v.clone()
        for state in run.optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.ndim > 0 and not isinstance(v, dmuon.OwnedTensor)
    ]


def poison(run, rank, bad_rank):
    """A NaN in the gradient of the last block's matrices only, on one rank."""
    hook = run.model.blocks[1].register_full_backward_pre_hook(
        lambda m, g: tuple(x * float("nan") for x in g) if rank == bad_rank else None
    )
    run.loss(9, rank).backward()
    hook.remove()


@pytest.mark.parametrize("world_size", [2])
def test_nonfinite_skip_and_propagate(world_size):
    run_ranks(check_nonfinite_policies, world_size)


def check_nonfinite_policies(rank, world_size):
    run = setup(world_size, muon={"nonfinite": "skip"})
    three_steps(run)
    before = full_weights(run.model)
    poison(run, rank, 1)
    run.optimizer.step()
    assert_same(full_weights(run.model), before)
    run = setup(world_size, muon={"nonfinite": "propagate"})
    poison(run, rank, 1)
    run.optimizer.step()
    assert torch.isnan(full_weights(run.model)["blocks.1.up.weight"]).any()
    run = setup(world_size)
    assert_all_raise(
        lambda: dmuon.Muon(run.model, nonfinite="ignore"), "ValueError", "nonfinite", "ignore"
    )


@pytest.mark.parametrize("world_size", [2])
def test_a_symmetric_nan_is_seen_too(world_size):
    run_ranks(check_symmetric_nan, world_size)


def check_symmetric_nan(rank, world_size):
    """The head is AdamW's; its NaN refuses the whole step all the same."""
    run = setup(world_size)
    three_steps(run)
    before = full_weights(run.model)
    run.loss(3, rank).backward()
    grad = run.model.head.bias.grad.to_local()
    if rank == 0 and grad.numel():
        grad.fill_(float("nan"))
    assert_all_raise(run.optimizer.step, "RuntimeError", "head.bias")
    assert_same(full_weights(run.model), before)


@pytest.mark.parametrize("world_size", [2])
def test_bad_keywords_are_refused_by_name(world_size):
    run_ranks(check_bad_keywords, world_size)


def check_bad_keywords(rank, world_size):
    run = setup(world_size)
    for keyword, value in (
        ("momentum", 1.5),
        ("momentum", -0.1),
        ("weight_decay", -1.0),
        ("ns_steps", 0),
        ("adamw_betas", (1.0, 0.9)),
        ("adamw_eps", -1e-8),
        ("adjust_lr", "rms"),
        ("ns_backend", "svd"),
        ("tp_distributed_gram_policy", "sometimes"),
    ):
        word = keyword.removeprefix("adamw_").removeprefix("ns_")
        assert_all_raise(partial(dmuon.Muon, run.model, **{keyword: value}), "ValueError", word)
    run.train(0)


def test_keywords_are_those_of_the_contract():
    import inspect

    names = list(inspect.signature(dmuon.Muon.__init__).parameters)[1:]
    wanted = [
        "model",
        "lr",
        "momentum",
        "weight_decay",
        "ns_steps",
        "adamw_lr",
        "adamw_betas",
        "adamw_weight_decay",
        "adamw_eps",
        "param_groups",
        "ns_backend",
        "nesterov",
        "replicate_async",
        "tp_distributed_gram",
        "tp_distributed_gram_policy",
        "adjust_lr",
        "nonfinite",
    ]
    assert set(wanted) <= set(names), set(wanted) - set(names)

"""set_model_state_dict and set_optimizer_state_dict: all of it or nothing, on all ranks alike."""

import copy

import dmuon
import torch

from tests.checkpoints.kinds import assert_same, layout_of, start, train, whole
from tests.support.meshes import on, run_on
from tests.support.models import Net
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks

MATRIX, BIAS = "blocks.0.up.weight", "inp.bias"


def dictionaries(run):
    model = dmuon.get_model_state_dict(run.model, rank0_only=False)
    return model, dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)


def changed(state, change):
    """A deep copy in which one thing is wrong."""
    state = copy.deepcopy(state)
    change(state)
    return state


def put(key, value):
    return lambda state: state.__setitem__(key, value)


def leave_out(key):
    return lambda state: state.pop(key)


# Models ----------------------------------------------------------------------------------------


@on([layout_of("fsdp2"), layout_of("hsdp")])
def test_a_models_dictionary_that_does_not_fit_changes_nothing(layout):
    run_on(layout, check_model, "fsdp2" if layout.is_flat else "hsdp")


def check_model(rank, layout, kind):
    run = start(kind)
    train(run, 0, 2)
    good, before = dictionaries(run)[0], whole(run)
    last = layout.ranks - 1

    def refused(change, *words, only=None):
        given = changed(good, change) if only in (None, rank) else good
        load = lambda: dmuon.set_model_state_dict(run.model, given)  # noqa: E731
        assert_all_raise(load, "ValueError", *words)

    for only in (None, 0, last):
        refused(leave_out(MATRIX), "missing", MATRIX, only=only)
        refused(put("blocks.9.up.weight", torch.zeros(2)), "unexpected: 'blocks.9.up", only=only)
        for shape in ((1, 17), (29, 1), (1,), (17, 29), (29, 17, 1), ()):
            if only is None:
                refused(put(MATRIX, torch.ones(shape)), "of another shape", MATRIX, str(shape))
        refused(put(BIAS, torch.ones(1)), "of another shape", BIAS, "(1,)", only=only)
        refused(put(BIAS, 3.0), BIAS, "float", only=only)
    refused(lambda s: s.clear(), "empty on this rank", only=0)
    for given in (None, [1], "path"):
        mine = given if rank == last else good
        load = lambda: dmuon.set_model_state_dict(run.model, mine)  # noqa: B023, E731
        assert_all_raise(load, "ValueError", f"is a {type(given).__name__}")
    nothing = lambda: dmuon.set_model_state_dict(run.model, {})  # noqa: E731
    assert_all_raise(nothing, "ValueError", "empty")
    assert_same(whole(run), before)


# Optimizers ------------------------------------------------------------------------------------


def test_an_optimizers_dictionary_that_does_not_fit_changes_nothing():
    run_ranks(check_optimizer, 2)


def check_optimizer(rank, world_size):
    run = start("fsdp2")
    train(run, 0, 2)
    (_, good), before = dictionaries(run), whole(run)
    settings = copy.deepcopy([{**g, "params": None} for g in run.optimizer.param_groups])

    def of(name, change):
        return lambda state: change(state["state"][name])

    for change, words in (
        (leave_out("state"), ("must have 'state' and 'param_groups'",)),
        (put("version", 1), ("version",)),
        (of(MATRIX, put("exp_avg", torch.zeros(29, 17))), ("unexpected", f"{MATRIX}.exp_avg")),
        (of(MATRIX, put("momentum_buffer", torch.zeros(1, 17))), ("another shape", "(1, 17)")),
        (of(BIAS, put("exp_avg", torch.zeros(1))), ("another shape", f"{BIAS}.exp_avg")),
        (of(BIAS, put("step", torch.zeros(17))), ("another shape", f"{BIAS}.step")),
        (of(BIAS, leave_out("step")), ("missing", f"{BIAS}.step")),
        (lambda s: put("ghost", {})(s["state"]), ("state of 'ghost'",)),
        (lambda s: s["param_groups"].pop(), ("missing",)),
        (lambda s: s["param_groups"][0]["params"].append("ghost"), ("unexpected", "ghost")),
        (lambda s: put("params", [0, 1])(s["param_groups"][0]), ("by position",)),
    ):
        for only in (0, 1):
            given = changed(good, change) if rank == only else good
            load = lambda: dmuon.set_optimizer_state_dict(run.model, run.optimizer, given)  # noqa: B023, E731
            assert_all_raise(load, "ValueError", *words)
    assert_same(whole(run), before)
    assert [{**g, "params": None} for g in run.optimizer.param_groups] == settings
    other = torch.optim.SGD(run.model.parameters(), lr=1.0)
    assert_all_raise(
        lambda: dmuon.set_optimizer_state_dict(run.model, other, good), "ValueError", "SGD"
    )


def test_a_parameter_without_state_starts_anew():
    run_ranks(check_anew, 2)


def check_anew(rank, world_size):
    run = start("fsdp2")
    train(run, 0, 2)
    _, state = dictionaries(run)
    for name in (MATRIX, BIAS):
        del state["state"][name]
    dmuon.set_optimizer_state_dict(run.model, run.optimizer, state)
    _, got = dictionaries(run)
    assert not got["state"][MATRIX]["momentum_buffer"].any()
    assert BIAS not in got["state"]
    train(run, 2, 3)
    _, got = dictionaries(run)
    assert got["state"][BIAS]["step"] == 1 and got["state"]["inp.weight"]["step"] == 3


def test_settings_come_with_the_parameters_they_were_saved_for():
    run_ranks(check_groups, 2)


def check_groups(rank, world_size):
    run = start("fsdp2", muon={"momentum": 0.8, "lr": 0.5})
    train(run, 0, 1)
    torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.5)
    _, state = dictionaries(run)
    other = start("fsdp2")
    dmuon.set_optimizer_state_dict(other.model, other.optimizer, state if rank == 0 else {})
    for mine, theirs in zip(other.optimizer.param_groups, run.optimizer.param_groups):
        assert {**mine, "params": None} == {**theirs, "params": None}
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    assert other.optimizer.param_groups[0]["initial_lr"] == 0.5
    dmuon.set_model_state_dict(other.model, dmuon.get_model_state_dict(run.model))
    for each in (run, other):
        train(each, 1, 3)
    assert_same(whole(other), whole(run))


# Half precision --------------------------------------------------------------------------------


def test_bfloat16_parameters_go_on_bit_for_bit():
    """Their float32 masters are in the optimizer's dictionary; the model's has them rounded."""
    run_ranks(check_bfloat16, 2)


def check_bfloat16(rank, world_size):
    run, other = start_bfloat16(), start_bfloat16()
    train(run, 0, 3)
    model, state = dictionaries(run)
    assert model[MATRIX].dtype == torch.bfloat16
    assert state["state"][MATRIX]["master"].dtype == torch.float32
    assert torch.equal(state["state"][MATRIX]["master"].bfloat16(), model[MATRIX])
    train(other, 5, 6)
    dmuon.set_model_state_dict(other.model, model)
    dmuon.set_optimizer_state_dict(other.model, other.optimizer, state)
    for each in (run, other):
        train(each, 3, 5)
    assert_same(whole(other), whole(run))


def start_bfloat16():
    return start(
        "fsdp2",
        {
            "make_model": lambda: Net().bfloat16(),
            "criterion": lambda model, x, y: (model(x.bfloat16()).float() - y).square().mean(),
        },
    )

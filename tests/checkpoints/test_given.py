"""What users give and models have beside float32 tensors: dtypes, parts of tensors, malformed dictionaries,
extra state, settings that are tensors, optimizers of other models."""

import copy

import dmuon
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.checkpoints.kinds import assert_same, start, train, whole
from tests.support.models import Net
from tests.support.parity import assert_all_raise, gathered
from tests.support.ranks import run_ranks

MATRIX, BIAS = "blocks.0.up.weight", "inp.bias"


def loads(run, state):
    return lambda: dmuon.set_model_state_dict(run.model, state)


# Dtypes ----------------------------------------------------------------------------------------

DOUBLE = {
    "make_model": lambda: Net().double(),
    "criterion": lambda model, x, y: (model(x.double()) - y).square().mean(),
}


@pytest.mark.parametrize("route", ["muon", "adamw"])
def test_states_of_a_float64_model_are_what_their_owners_have(route):
    run_ranks(check_float64, 2, route)


def check_float64(rank, world_size, route):
    policy = {"overrides": [{"name": "up", "set": {"route": route}}]}
    run, other = (start("fsdp2", {**DOUBLE, "dedicate": {"param_policy": policy}}) for _ in "12")
    train(run, 0, 2)
    mine = {
        f"{p.param_name}: {key}": value.clone()
        for p in dmuon.get_owned_params(run.model, rank)
        for key, value in run.optimizer.engine_state(p).items()
    }
    want = {name: value for owned in gathered(mine) for name, value in owned.items()}
    state = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)["state"]
    got = {f"{n}: {k}": v for n, entry in state.items() for k, v in entry.items()}
    assert_same({name: got[name] for name in want}, want)
    assert got["inp.weight: exp_avg"].dtype == torch.float64
    # From the first rank alone: tensors are sent in their own dtypes.
    states = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    dmuon.set_model_state_dict(other.model, dmuon.get_model_state_dict(run.model))
    dmuon.set_optimizer_state_dict(other.model, other.optimizer, states)
    for each in (run, other):
        train(each, 2, 4)
    assert_same(whole(other), whole(run))


class Odd(Net):
    """Buffers of dtypes that not every backend can send."""

    KINDS = (torch.int16, torch.uint16, torch.uint64, torch.bool, torch.float8_e4m3fn)

    def __init__(self):
        super().__init__()
        for dtype in (*self.KINDS, torch.int64, torch.complex64):
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(name, torch.ones(3).to(dtype))


def test_buffers_of_any_dtype_are_sent_and_none_is_cut_down():
    run_ranks(check_odd, 2)


def check_odd(rank, world_size):
    run = start("fsdp2", {"make_model": Odd})
    state = dmuon.get_model_state_dict(run.model)
    for dtype in Odd.KINDS if rank == 0 else ():
        state[str(dtype).removeprefix("torch.")] = torch.zeros(3).to(dtype)
    dmuon.set_model_state_dict(run.model, state)
    assert not any(getattr(run.model, n).float().any() for n in ("int16", "uint64", "bool"))
    for name, value in (
        ("int64", torch.full((3,), 2.7)),
        (BIAS, torch.zeros(17, dtype=torch.complex64)),
        (BIAS, torch.zeros(17).to_sparse()),
        (BIAS, torch.zeros(17, device="meta")),
    ):
        wrong = {**state, name: value} if rank == 0 else {}
        assert_all_raise(loads(run, wrong), "ValueError", "not to be used", name)


def test_parts_of_tensors_are_not_taken_for_whole_ones():
    run_ranks(check_parts, 2)


def check_parts(rank, world_size):
    run = start("fsdp2")
    before = whole(run)
    parts = run.model.state_dict()
    assert_all_raise(loads(run, parts), "ValueError", "model.load_state_dict takes", BIAS, MATRIX)
    assert_same(whole(run), before)


def test_one_tied_weight_has_one_value():
    run_ranks(check_tied, 2)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].norm.weight = self.blocks[0].norm.weight


def check_tied(rank, world_size):
    run = start("fsdp2", {"make_model": Tied, "wrap": shard_root})
    state = dmuon.get_model_state_dict(run.model, rank0_only=False)
    state["blocks.1.norm.weight"] = state["blocks.1.norm.weight"] + 1
    assert_all_raise(loads(run, state), "ValueError", "two values", "blocks.1.norm.weight")


def shard_root(model, mesh, **options):
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh, **options)


# Malformed -------------------------------------------------------------------------------------


def test_a_malformed_optimizer_dictionary_on_one_rank_is_an_error_on_all():
    run_ranks(check_malformed, 2)


def check_malformed(rank, world_size):
    run = start("fsdp2")
    train(run, 0, 1)
    good = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)
    before = whole(run)

    def refused(change, *words):
        given = copy.deepcopy(good)
        if rank == 1:
            change(given)
        call = lambda: dmuon.set_optimizer_state_dict(run.model, run.optimizer, given)  # noqa: E731
        assert_all_raise(call, "ValueError", *words)

    for groups in (None, [1], [{}]):
        refused(lambda s: s.update(param_groups=groups), "the optimizer's state_dict")  # noqa: B023
    refused(lambda s: s.update(state=None), "the optimizer's state_dict")
    refused(lambda s: s["state"].update({BIAS: [1]}), "the optimizer's state_dict")
    for lr, words in (
        ("a", "must be a number"),
        (float("nan"), "lr of"),
        (-1.0, "lr of"),
        (0.5, "load the same optimizer state"),
    ):
        refused(lambda s: s["param_groups"][0].update(lr=lr), words)  # noqa: B023
    refused(lambda s: s["param_groups"][0].update(momentum=-1.0), "momentum of")
    assert_same(whole(run), before)


def test_another_models_optimizer_is_refused_on_all_ranks(tmp_path):
    run_ranks(check_other_optimizer, 2, str(tmp_path))


def check_other_optimizer(rank, world_size, root):
    one, two = start("fsdp2"), start("fsdp2")
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    for wrong in (two.optimizer, plain):
        mine = wrong if rank else one.optimizer
        for call in (
            lambda: dmuon.state_dict(one.model, mine),  # noqa: B023
            lambda: dmuon.get_optimizer_state_dict(one.model, mine),  # noqa: B023
            lambda: dmuon.set_optimizer_state_dict(one.model, mine, {}),  # noqa: B023
        ):
            assert_all_raise(call, "ValueError", "must be the dmuon.Muon of this model")


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.extra = inner, nn.Linear(2, 2)


def test_a_model_of_which_a_part_was_dedicated_is_not_half_saved():
    run_ranks(check_outer, 2)


def check_outer(rank, world_size):
    outer = Outer(start("fsdp2").model)
    call = lambda: dmuon.get_model_state_dict(outer)  # noqa: E731
    assert_all_raise(call, "ValueError", "left out in silence")


# What is no tensor, or no float ----------------------------------------------------------------


class Extra(Net):
    """As quantisation's modules keep their scales."""

    def __init__(self):
        super().__init__()
        self.kept = {"amax": torch.ones(2), "n": 3}

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


def test_extra_state_of_modules_goes_everywhere(tmp_path):
    run_ranks(check_extra, 2, str(tmp_path))


def check_extra(rank, world_size, root):
    run = start("fsdp2", {"make_model": Extra})
    run.model.kept = {"amax": torch.full((2,), 5.0), "n": 7}
    state = dmuon.get_model_state_dict(run.model)
    dcp.save({"app": dmuon.state_dict(run.model, run.optimizer)}, checkpoint_id=f"{root}/dcp")

    def assert_loaded(other):
        assert other.model.kept["n"] == 7 and other.model.kept["amax"].eq(5).all()

    other = start("fsdp2", {"make_model": Extra})
    dmuon.set_model_state_dict(other.model, state)
    assert_loaded(other)
    other = start("fsdp2", {"make_model": Extra})
    app = dmuon.state_dict(other.model, other.optimizer)
    dcp.load({"app": app}, checkpoint_id=f"{root}/dcp")
    assert_loaded(other)
    dmuon.save_checkpoint(f"{root}/own", 1, run.model, run.optimizer)
    other = start("fsdp2", {"make_model": Extra})
    dmuon.load_checkpoint(f"{root}/own", other.model, other.optimizer)
    assert_loaded(other)
    plain = start("fsdp2")
    load = lambda: dmuon.load_checkpoint(f"{root}/own", plain.model, plain.optimizer)  # noqa: E731
    assert_all_raise(load, "ValueError", "unexpected: '_extra_state'")
    run.model.kept = object()
    save = lambda: dmuon.save_checkpoint(f"{root}/own", 2, run.model, run.optimizer)  # noqa: E731
    assert_all_raise(save, "ValueError", "_extra_state cannot be saved", "object")


def test_a_rate_that_is_a_tensor_is_saved_as_it_was_and_loaded_into():
    run_ranks(check_tensor_rate, 1)


def check_tensor_rate(rank, world_size):
    run = start("alone", muon={"lr": torch.tensor(0.25)})
    rate = run.optimizer.param_groups[0]["lr"]
    state = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    rate.fill_(0.125)
    assert state["param_groups"][0]["lr"] == 0.25
    dmuon.set_optimizer_state_dict(run.model, run.optimizer, state)
    assert run.optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25


# The two state_dicts ---------------------------------------------------------------------------

HALF = {
    "make_model": lambda: Net().bfloat16(),
    "criterion": lambda model, x, y: (model(x.bfloat16()).float() - y).square().mean(),
}


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_the_two_state_dicts_keep_float32_masters(kind, tmp_path):
    run_ranks(check_masters, 2, kind, str(tmp_path))


def check_masters(rank, world_size, kind, root):
    """Into an optimizer that has never stepped, as a new process has it."""
    run, other = start(kind, HALF), start(kind, HALF)
    train(run, 0, 3)
    dcp.save(both(run), checkpoint_id=root)
    state = both(other)
    dcp.load(state, checkpoint_id=root)
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optim"])
    for each in (run, other):
        train(each, 3, 5)
    assert_same(whole(other), whole(run))


def test_torchs_own_functions_load_into_a_fresh_optimizer(tmp_path):
    run_ranks(check_torchs_functions, 2, str(tmp_path))


def check_torchs_functions(rank, world_size, root):
    run, other = start("fsdp2"), start("fsdp2")
    train(run, 0, 3)
    dcp.save(of_torch(run), checkpoint_id=root)
    state = of_torch(other)
    dcp.load(state, checkpoint_id=root)
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    for each in (run, other):
        train(each, 3, 5)
    assert_same(whole(other), whole(run))


def of_torch(run):
    return dict(zip(("model", "optim"), get_state_dict(run.model, run.optimizer), strict=True))


def both(run):
    return {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}


def test_a_state_that_is_saved_before_the_first_step_is_no_state():
    run_ranks(check_unused, 2)


def check_unused(rank, world_size):
    run = start("fsdp2")
    run.optimizer.state_dict()
    state = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)["state"]
    assert BIAS not in state and MATRIX in state

"""What DeepSpeed's users reach for, on models whose matrices are dedicated."""

import copy
import io
import os
import warnings

import dmuon
import pytest
import torch
import torch.distributed as dist

from tests.support.models import Net
from tests.support.oracle import relative_error
from tests.support.ranks import run_ranks
from tests.support.zero import (
    STAGES,
    OneProcess,
    batch,
    chosen_by,
    ds_config,
    loss_of,
    make_engine,
    train,
    weights,
)

by_stage = pytest.mark.parametrize("stage", STAGES)
by_resident_stage = pytest.mark.parametrize("stage", [0, 1, 2])


def seeded():
    torch.manual_seed(7)
    return Net()


@by_stage
def test_freezing_a_module(stage):
    run_ranks(check_freezing, 2, stage, limit_s=90)


def check_freezing(rank, world_size, stage):
    """`requires_grad_` of a module reaches the dedicated weights in it, there and back."""
    engine = make_engine(ds_config(stage))
    up = engine.module.blocks[0].up
    up.requires_grad_(False)
    before = weights(engine)["blocks.0.up.weight"]
    train(engine, 1)
    assert torch.equal(weights(engine)["blocks.0.up.weight"], before)
    up.requires_grad_(True)
    train(engine, 1, first=1)
    assert not torch.equal(weights(engine)["blocks.0.up.weight"], before)


@by_stage
def test_averages_of_the_weights(stage):
    run_ranks(check_averages, 2, stage, limit_s=90)


def check_averages(rank, world_size, stage):
    """A copy made before `deepspeed.initialize` takes part in nothing; `full_fp32_param` feeds it."""
    model = seeded()
    average = copy.deepcopy(model)
    engine = make_engine(ds_config(stage), lambda: model)
    reference = OneProcess(seeded(), chosen_by(engine), world_size)
    wanted = copy.deepcopy(reference.model)
    for step in range(3):
        train(engine, 1, first=step)
        reference.train(1, first=step)
        for name, p in average.named_parameters():
            p.data.lerp_(dmuon.zero.full_fp32_param(engine, name), 0.5)
        for p, q in zip(wanted.parameters(), reference.model.parameters(), strict=True):
            p.data.lerp_(q.detach(), 0.5)
    for (name, p), q in zip(average.named_parameters(), wanted.parameters(), strict=True):
        assert relative_error(p, q) < 2e-6, name


@by_stage
def test_loops_over_the_modules_parameters(stage):
    run_ranks(check_loops, 2, stage, limit_s=90)


def check_loops(rank, world_size, stage):
    """They would miss dedicated weights in silence. DeepSpeed's own walks are not warned about."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        engine = make_engine(ds_config(stage))
        train(engine, 1)
    names = [name for name, _ in dmuon.zero.named_parameters(engine)]
    assert names == [name for name, _ in seeded().named_parameters()]
    says = r"listed without its 4 dedicated ones.*dmuon\.zero\.named_parameters\(engine\)"
    with pytest.warns(UserWarning, match=says):
        list(engine.module.named_parameters())
    with pytest.warns(UserWarning, match=says):
        list(engine.module.parameters())
    if stage < 3:
        average = torch.optim.swa_utils.AveragedModel(engine.module)
        with pytest.warns(UserWarning, match=says):
            average.update_parameters(engine.module)


@by_stage
def test_functions_on_single_parameters(stage):
    run_ranks(check_single_parameters, 2, stage, limit_s=90)


def check_single_parameters(rank, world_size, stage):
    from deepspeed import utils

    engine = make_engine(ds_config(stage))
    engine.backward(loss_of(engine, 0))
    held, reference = dict(dmuon.zero.named_parameters(engine)), OneProcess(seeded(), [], 2)
    for part in range(world_size):
        reference.add_gradients(0, part, 0)
    for name in sorted(chosen_by(engine)):
        p, plain = held[name], reference.model.get_parameter(name)
        assert torch.equal(utils.safe_get_full_fp32_param(p), plain.detach())
        assert relative_error(utils.safe_get_full_grad(p), plain.grad) < 1e-6
    value, momentum = torch.full_like(plain, 0.5), torch.randn_like(plain)
    utils.safe_set_full_fp32_param(p, value)
    utils.safe_set_full_grad(p, torch.zeros_like(plain))
    utils.safe_set_full_optimizer_state(p, momentum, "momentum_buffer")
    assert torch.equal(utils.safe_get_full_grad(p), torch.zeros_like(plain))
    engine.step()
    assert engine.was_step_applied()
    got = utils.safe_get_full_optimizer_state(p, "momentum_buffer")
    assert relative_error(got, 0.95 * momentum) < 1e-6
    update = dmuon.newton_schulz(0.95 * got)  # Nesterov's, of a gradient of zero
    rate = 0.02 * 0.2 * max(value.shape) ** 0.5
    assert relative_error(utils.safe_get_full_fp32_param(p), value - rate * update) < 1e-5
    with pytest.raises(ValueError, match="has no state 'exp_avg'; it has momentum_buffer"):
        utils.safe_get_full_optimizer_state(p, "exp_avg")


@by_resident_stage
def test_state_dicts_copies_and_evaluation_on_one_rank(stage):
    run_ranks(check_whole_module, 2, stage, limit_s=90)


def check_whole_module(rank, world_size, stage):
    """Weights are whole on every rank: no call of these needs the others."""
    engine = make_engine(ds_config(stage))
    train(engine, 2)
    want, x = weights(engine), batch(9, rank, world_size)[0]
    if rank == 0:
        file = io.BytesIO()
        torch.save(engine.module.state_dict(), file)
        file.seek(0)
        other = Net()
        other.load_state_dict(torch.load(file))
        twin = copy.deepcopy(engine.module).eval()
        with torch.no_grad():
            wanted = other(x)
            assert torch.equal(engine.module.eval()(x), wanted) and torch.equal(twin(x), wanted)
        engine.module.train()
        for name, value in other.named_parameters():
            assert torch.equal(value, want[name]), name
    dist.barrier()
    train(engine, 1, first=2)


def test_state_dicts_and_copies_at_stage_3():
    run_ranks(check_cut_module, 2, limit_s=90)


def check_cut_module(rank, world_size):
    """DeepSpeed's are empty there, dmuon's refuse; `get_model_state_dict` has all, on rank 0."""
    engine = make_engine(ds_config(3))
    train(engine, 1)
    want = weights(engine)
    with pytest.raises(RuntimeError, match=r"lies on rank \d alone.*dmuon.get_model_state_dict"):
        torch.save(engine.module.state_dict(), io.BytesIO())
    with pytest.raises(RuntimeError, match="the copy is not managed and holds placeholders"):
        copy.deepcopy(engine.module).state_dict()
    whole = dmuon.get_model_state_dict(engine)
    assert set(whole) == (set(want) if rank == 0 else set())
    assert all(torch.equal(value, want[name]) for name, value in whole.items())


def test_gathered_parameters_at_stage_3():
    run_ranks(check_gathered, 2, limit_s=90)


def check_gathered(rank, world_size):
    """To read, as who sends weights to an inference server does, and to write on one rank."""
    import deepspeed

    engine = make_engine(ds_config(3))
    train(engine, 1)
    want, calls = weights(engine), dmuon.report(engine)
    held = dict(dmuon.zero.named_parameters(engine))
    for name, p in held.items():
        with deepspeed.zero.GatheredParameters([p]):
            assert torch.equal(p, want[name]), name
    name = max(chosen_by(engine))
    with deepspeed.zero.GatheredParameters(list(held.values()), modifier_rank=1), torch.no_grad():
        if rank == 1:
            held[name].fill_(0.5)
    want[name].fill_(0.5)
    for other, value in weights(engine).items():
        assert torch.equal(value, want[other]), other
    assert calls["ns_calls"] == dmuon.report(engine)["ns_calls"]
    train(engine, 1, first=1)
    assert not torch.equal(dmuon.zero.full_fp32_param(engine, name), want[name])


@by_stage
def test_monitors_and_timers(stage, tmp_path):
    run_ranks(check_monitors, 2, stage, str(tmp_path), limit_s=90)


def check_monitors(rank, world_size, stage, folder):
    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
    options = {"csv_monitor": monitor, "wall_clock_breakdown": True, "steps_per_print": 1}
    engine = make_engine(ds_config(stage, clip=0.1, **options))
    train(engine, 2)
    dist.barrier()
    with open(os.path.join(folder, "job", "Train_Samples_lr.csv")) as file:
        assert file.read().split() == ["step,lr", "2,0.02", "4,0.02"]
    times = engine.timers.get_timers()
    assert {"step", "fwd", "bwd"} <= set(times) and engine.get_global_grad_norm() > 0

"""Every public function of dmuon's takes the engine or its module, or says what to use."""

import os
from functools import partial
from unittest import mock

import dmuon
import pytest
import torch
from dmuon.zero import full_fp32_param, named_parameters
from torch import nn

from tests.support.models import Net, in_blocks
from tests.support.parity import assert_all_raise, assert_same, total
from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, ds_config, loss_of, make_engine, train, weights
from tests.support.zero_checkpoints import trained

by_stage = pytest.mark.parametrize("stage", STAGES)
MATRICES = {f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("up", "down")}


@by_stage
def test_what_is_told_of_a_model(stage):
    run_ranks(check_told, 2, stage, limit_s=90)


def check_told(rank, world_size, stage):
    engine = trained(ds_config(stage))
    for model in (engine, engine.module):
        assert {p.param_name for p in dmuon.get_dedicated_params(model)} == MATRICES
        owned = dmuon.get_owned_params(model, rank)
        assert all(p.is_owner and p._owned_data is not None for p in owned)
        assert total(len(owned)) == len(MATRICES)
        report = dmuon.report(model)
        assert total(report["ns_calls_last_step"]) == len(MATRICES)
        assert report["sent_bytes_last_step"] > 0
        plan = dmuon.summarize_comm_plan(model)
        assert plan["ranks"] == 2 and plan["bytes_per_step"] > 0
        dedicated = {p.parameter for p in dmuon.get_dedicated_params(model)}
        assert set(dmuon.ignored_params(model)) == dedicated
        groups = dmuon.summarize_param_groups(model, engine.optimizer)
        names = [(g["group_name"], g["tensors"], g["lr"]) for g in groups]
        assert names == [("0/muon", 4, 0.02), ("0/adamw", 10, 1e-3)]
        assert sum(g["numel"] for g in groups) == sum(p.numel() for p in Net().parameters())
    names = [name for name, _ in Net().named_parameters()]
    assert [name for name, _ in named_parameters(engine)] == names
    for name in names:
        assert full_fp32_param(engine, name).shape == Net().get_parameter(name).shape
    call = partial(full_fp32_param, engine, "blocks.0.up.wieght")
    assert_all_raise(call, "ValueError", "'blocks.0.up.wieght'", "'blocks.0.up.weight'")


@by_stage
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_whole_state(stage, bf16):
    run_ranks(check_whole_state, 2, stage, bf16, limit_s=90)


class WithBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.inp.bias.requires_grad_(False)


def check_whole_state(rank, world_size, stage, bf16):
    """What one process would save: float32, as the model was; buffers and frozen parameters too."""
    changes = {"bf16": {"enabled": True}} if bf16 else {}
    engine = make_engine(ds_config(stage, **changes), WithBuffer)
    train(engine, 2)
    for model in (engine, engine.module):
        got = dmuon.get_model_state_dict(model, rank0_only=False)
        assert all(t.dtype == torch.float32 for t in got.values())
        assert bool(dmuon.get_model_state_dict(model)) == (rank == 0)
        dmuon.set_model_state_dict(model, got)
        state = dmuon.get_optimizer_state_dict(model, engine.optimizer, rank0_only=False)
        dmuon.set_optimizer_state_dict(model, engine.optimizer, state)
        assert torch.equal(got.pop("scale"), torch.full((3,), 2.0))
        assert_same(got, weights(engine))
    train(engine, 1, first=2)


@by_stage
def test_manual_control(stage):
    run_ranks(check_manual, 2, stage, limit_s=90)


def check_manual(rank, world_size, stage):
    """Legal anywhere in a step, and without effect on it; a weight that is written by hand is spread."""
    plain, engine = trained(ds_config(stage), 0), trained(ds_config(stage), 0)
    train(plain, 2)
    for step in range(2):
        loss = loss_of(engine, step)
        control(engine)
        engine.backward(loss)
        control(engine.module)
        engine.step()
        control(engine)
    assert_same(weights(engine), weights(plain))
    for p in dmuon.get_owned_params(engine, rank):
        p._owned_data.fill_(0.25)
    dmuon.broadcast_all_updates(engine)
    if stage < 3:
        assert all((p.parameter == 0.25).all() for p in dmuon.get_dedicated_params(engine))
    losses = torch.stack([loss_of(engine, 5).detach(), loss_of(plain, 5).detach()])
    assert not torch.equal(losses[0], losses[1])
    train(engine, 1, first=2)


def control(model):
    dmuon.wait_all_reduces(model)
    dmuon.prepare_muon_grads(model)
    dmuon.broadcast_all_updates(model)
    dmuon.broadcast_all_updates_async(model)
    dmuon.wait_all_replicate_broadcasts(model)


@by_stage
def test_no_sync(stage):
    run_ranks(check_no_sync, 2, stage, limit_s=90)


def check_no_sync(rank, world_size, stage):
    """DeepSpeed's own: k micro-batches in it and one outside are one step. At stages 2 and 3 there is none."""
    engine, plain = make_engine(ds_config(stage)), make_engine(ds_config(stage))
    if stage >= 2:
        for model in (engine, engine.module):
            enter = dmuon.no_sync(model).__enter__
            assert_all_raise(enter, "ValueError", f"stage {stage}", "gradient_accumulation_steps")
        return
    for model in (engine, engine.module):
        with dmuon.no_sync(model), dmuon.no_sync(model):
            engine.backward(loss_of(engine, 0, 0, 2))
        engine.backward(loss_of(engine, 0, 1, 2))
        engine.step()
        with plain.no_sync():
            plain.backward(loss_of(plain, 0, 0, 2))
        plain.backward(loss_of(plain, 0, 1, 2))
        plain.step()
        assert_same(weights(engine), weights(plain))


@by_stage
def test_clipping_by_hand(stage):
    run_ranks(check_clipping, 2, stage, limit_s=90)


def check_clipping(rank, world_size, stage):
    """Its norm would be without the dedicated gradients, and before DeepSpeed's reduction."""
    engine = trained(ds_config(stage))
    engine.backward(loss_of(engine, 3))
    some = [engine.module.inp.weight]
    for given in (engine.module.parameters(), some, dict(named_parameters(engine)).values()):
        call = partial(nn.utils.clip_grad_norm_, list(given), 1.0)
        assert_all_raise(call, "ValueError", '"gradient_clipping"', "get_global_grad_norm")
    for optimizer in (engine, engine.optimizer, engine.basic_optimizer):
        call = partial(dmuon.clip_grad_norm_, optimizer, 1.0)
        assert_all_raise(call, "ValueError", '"gradient_clipping"')
    engine.step()
    other = torch.nn.Linear(3, 3)
    other(torch.ones(3)).sum().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # not DeepSpeed's


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled(stage):
    run_ranks(check_compiled, 2, stage, limit_s=90)


def check_compiled(rank, world_size, stage):
    """DeepSpeed's engine.compile: what the frames between the hooks compute is the same."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    plain, engine = trained(ds_config(stage)), make_engine(ds_config(stage))
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"):
        engine.compile(backend="eager")
        train(engine, 2)
    assert stats["unique_graphs"] > before, "nothing was compiled"
    assert_same(weights(engine), weights(plain))
    torch._dynamo.reset()


def test_before_there_is_an_engine():
    run_ranks(check_before, 2, limit_s=90)


def check_before(rank, world_size):
    make_engine(ds_config(1))  # the process group
    model = Net()
    for call in (dmuon.report, dmuon.get_dedicated_params, dmuon.get_model_state_dict):
        assert_all_raise(partial(call, model), "ValueError", "no dedicated parameters")
    plan = dmuon.dedicate_params_zero(model, ds_config(1), in_blocks)
    assert set(plan) == MATRICES and len(plan) == 4 and set(plan.values()) <= {0, 1}
    assert {p.param_name for p in dmuon.get_dedicated_params(model)} == MATRICES
    assert_all_raise(dmuon.no_sync(model).__enter__, "ValueError", "attach")
    got = dmuon.get_model_state_dict(model, rank0_only=False)
    assert_same(got, {name: p.detach() for name, p in model.state_dict().items()})
    assert_all_raise(partial(dmuon.Muon, model), "ValueError", "OwnerOptimizer")

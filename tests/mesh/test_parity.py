"""HSDP, tensor parallelism and both together train exactly as one process."""

import contextlib
import copy
from functools import partial

import dmuon
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp2.test_accumulation import accumulate, clip_each_step
from tests.fsdp2.test_moments import evaluate, evaluate_everywhere
from tests.support.meshes import cube, dp_tp, hsdp, on, run_on
from tests.support.models import Net, in_blocks, shard
from tests.support.oracle import Oracle, relative_error, tolerance
from tests.support.parity import Run, check_parity, full_weights, setup
from tests.support.tp_models import SEQUENCE_PARALLEL, subject, tokens

ONE_BY_ONE = [hsdp(2, 2), hsdp(1, 4), hsdp(4, 1), dp_tp(2, 2)]
AT_ONCE = [hsdp(2, 4), dp_tp(1, 2), dp_tp(2, 1), dp_tp(2, 4), cube(2, 2, 2)]


@on(ONE_BY_ONE)
def test_three_steps(layout):
    run_on(layout, check_steps)


def check_steps(rank, layout):
    check_parity(rank, layout, muon={"weight_decay": 0.1}, **subject(layout))


@on(AT_ONCE)
def test_everything_in_one_run_of_twenty_steps(layout):
    """Eight processes take seconds for each claim below, so here they are one."""
    run_on(layout, check_everything)


def check_everything(rank, layout):
    task = dict(subject(layout))
    task["make_model"] = partial(checkpointed, task.get("make_model", Net))
    wrap = partial(shard, reshard_after_forward=True)
    muon = {"weight_decay": 0.1, "lr": 0.01}
    check_parity(rank, layout, everything, wrap=wrap, muon=muon, **task)


def everything(run):
    """Accumulates, clips, evaluates, with a scheduler, each kind of step five times."""
    kinds = (partial(in_parts, True), partial(in_parts, False), clipped, evaluated)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, T_max=20)
    for step in range(20):
        kinds[step % len(kinds)](run, step)
        run.step()
        scheduler.step()


def in_parts(no_sync, run, step):
    for rank in run.ranks:
        with run.no_sync() if no_sync else contextlib.nullcontext():
            (run.loss(step, rank, 0, 2) / 2).backward()
        (run.loss(step, rank, 1, 2) / 2).backward()


def clipped(run, step):
    for rank in run.ranks:
        run.loss(step, rank).backward()
    run.losses.append(float(run.clip(0.05)))


def evaluated(run, step):
    evaluate(run, torch.no_grad)
    for rank in run.ranks:
        run.loss(step, rank).backward()
    evaluate(run, torch.no_grad)


@on([dp_tp(2, 2), cube(2, 2, 2)])
def test_sequence_parallel_plans(layout):
    run_on(layout, check_sequence)


def check_sequence(rank, layout):
    """The gradient of a weight that is whole on every rank is a sum over their positions."""
    check_parity(rank, layout, **SEQUENCE_PARALLEL)


@on(ONE_BY_ONE)
def test_accumulation(layout):
    run_on(layout, check_accumulation)


def check_accumulation(rank, layout):
    for no_sync in (True, False):
        check_parity(rank, layout, accumulate(no_sync), **subject(layout))


@on(ONE_BY_ONE)
def test_clipping_counts_each_element_once(layout):
    run_on(layout, check_clipping)


def check_clipping(rank, layout):
    for norm_type in (2.0, float("inf")):
        check_parity(rank, layout, clip_each_step(norm_type), **subject(layout))
    check_parity(rank, layout, clip_with_torch, **subject(layout))


def clip_with_torch(run):
    for step, max_norm in enumerate([0.05, 1e9]):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)
        run.losses.append(float(norm))
        run.step()


@on(ONE_BY_ONE)
def test_activation_checkpointing(layout):
    run_on(layout, check_checkpointing)


def check_checkpointing(rank, layout):
    task = dict(subject(layout))
    make = task.pop("make_model", Net)
    for kind in (CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT):
        check_parity(rank, layout, two_steps, make_model=partial(checkpointed, make, kind), **task)


def checkpointed(make, kind=CheckpointImpl.NO_REENTRANT):
    model = make()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=kind)
    return model


def two_steps(run):
    for step in range(2):
        run.train(step)


@on(ONE_BY_ONE)
def test_evaluation_at_any_moment(layout):
    run_on(layout, check_evaluation)


def check_evaluation(rank, layout):
    wrap = partial(shard, reshard_after_forward=True)
    check_parity(rank, layout, evaluate_everywhere, wrap=wrap, **subject(layout))


@on(ONE_BY_ONE)
def test_twenty_steps_with_a_scheduler(layout):
    run_on(layout, check_twenty_steps)


def check_twenty_steps(rank, layout):
    muon = {"weight_decay": 0.1, "lr": 0.01}
    check_parity(rank, layout, annealed, muon=muon, **subject(layout))


def annealed(run):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, T_max=20)
    for step in range(20):
        run.train(step)
        scheduler.step()


# bf16 ------------------------------------------------------------------------------------------

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SMOOTH = {"adamw_eps": 1.0, "adamw_lr": 0.1}  # else the sign of a rounding error moves a weight


class InBf16(nn.Module):
    """What the policy does, on one process: float32 weights, cast at each use."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        weights = {n: p.to(torch.bfloat16) for n, p in self.net.named_parameters()}
        x = x.to(torch.bfloat16) if x.is_floating_point() else x
        return torch.func.functional_call(self.net, weights, x)


@on(ONE_BY_ONE + AT_ONCE)
def test_a_bf16_policy_costs_no_more_than_on_one_process(layout):
    run_on(layout, check_bf16)


def check_bf16(rank, layout):
    """As far from float32 as one process that computes in bf16; but T ranks round a sum over their
    shards 2T - 1 times, which is a random walk."""
    task = subject(layout)
    run = setup(layout, wrap=partial(shard, mp_policy=BF16), muon=SMOOTH, **task)
    two_steps(run)
    weights = full_weights(run.model)
    assert {p._owned_data.dtype for p in dmuon.get_owned_params(run.model, rank)} <= {torch.float32}
    if rank == 0:
        low, high = (one_process(layout, bf16) for bf16 in (True, False))
        for name, want in high.items():
            cost, error = (relative_error(w[name], want) for w in (low, weights))
            allowed = max(2 * (2 * layout.tp - 1) ** 0.5 * cost, tolerance(run.steps))
            assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"
            assert error >= cost / 4, f"{name}: {error:.2e} is float32, bf16 costs {cost:.2e}"


def one_process(layout, bf16):
    torch.manual_seed(7)
    plain = subject(layout).get("make_model", Net)()
    chosen = {n for n, p in plain.named_parameters() if in_blocks(n, p)}
    model = InBf16(plain) if bf16 else plain
    names = {f"net.{n}" for n in chosen} if bf16 else chosen
    ranks = list(range(layout.data_ranks))
    sample = {"sample": tokens} if layout.tp_name else {}
    run = Run(model, Oracle(model, names, **SMOOTH), ranks, len(ranks), managed=False, **sample)
    two_steps(run)
    return copy.deepcopy(dict(plain.named_parameters()))

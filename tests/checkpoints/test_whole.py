"""get_model_state_dict and get_optimizer_state_dict give what one process would save."""

import dmuon
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.checkpoints.kinds import KINDS, MIXED, assert_close, assert_same, layout_of, start, train
from tests.support.meshes import run_on
from tests.support.models import Block, Net, in_blocks
from tests.support.parity import full_weights
from tests.support.ranks import run_ranks
from tests.support.tp_models import mixed

TOLERANCE = 2e-5  # as in test_anywhere.py


class Rich(Net):
    """With a tied matrix, a tied vector, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__(dims=((17, 29), (17, 17)), block=Block)
        self.blocks[1].down.weight = self.blocks[1].up.weight
        self.shift = self.inp.bias
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 17))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        x = self.inp(x) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RICH = {"make_model": Rich}


def model_of(kind):
    return MIXED if layout_of(kind).tp_name else RICH


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_dictionaries_of_one_process(kind):
    alone = run_ranks(trained_alone, 1, model_of(kind) is MIXED)[0]
    run_on(layout_of(kind), check_whole, kind, alone)


def as_lists(state):
    """Plain data, which goes through a pipe."""
    return {name: (v.tolist(), tuple(v.shape), str(v.dtype)) for name, v in state.items()}


def trained_alone(rank, world_size, of_tp):
    run = start("alone", MIXED if of_tp else RICH)
    train(run, 0, 3)
    optimizer = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    state = {name: as_lists(entry) for name, entry in optimizer["state"].items()}
    return as_lists(dmuon.get_model_state_dict(run.model)), state, optimizer["param_groups"]


def check_whole(rank, layout, kind, alone):
    run = start(kind, None if layout.tp_name else RICH)
    train(run, 0, 3)
    model = dmuon.get_model_state_dict(run.model, rank0_only=False)
    plain = get_model_state_dict(mixed() if layout.tp_name else Rich())
    assert list(model) == list(plain) == list(alone[0])
    assert_like(model, alone[0])
    assert_same({n: model[n] for n in full_weights(run.model)}, full_weights(run.model))
    if not layout.tp_name:
        assert model["blocks.1.down.weight"] is model["blocks.1.up.weight"]
        assert model["shift"] is model["inp.bias"]
        assert torch.equal(model["scale"], Rich().scale)
    optimizer = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)
    assert optimizer["param_groups"] == alone[2]
    assert optimizer["state"].keys() == alone[1].keys()
    for name, entry in optimizer["state"].items():
        assert_like(entry, alone[1][name])
    assert_options(rank, run, model, optimizer)


def assert_like(got, alone):
    kinds = {name: (tuple(v.shape), str(v.dtype)) for name, v in got.items()}
    assert kinds == {name: (shape, dtype) for name, (_, shape, dtype) in alone.items()}
    want = {
        name: torch.tensor(values, dtype=got[name].dtype).view(shape)
        for name, (values, shape, _) in alone.items()
    }
    assert_close(got, want, TOLERANCE)


def assert_options(rank, run, model, optimizer):
    """Copies, on the CPU; on the first rank only, as by default, which is the same numbers."""
    first = dmuon.get_model_state_dict(run.model, cpu_offload=False)
    state = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    if rank:
        assert first == {} and state == {}
    else:
        assert_same(first, model)
        assert state["param_groups"] == optimizer["param_groups"]
        for name, entry in state["state"].items():
            assert_same(entry, optimizer["state"][name])
    kept = {name: value.clone() for name, value in model.items()}
    run.train(3)
    assert_same(model, kept)


# Memory ----------------------------------------------------------------------------------------


def test_a_rank_that_receives_nothing_holds_one_parameter_at_a_time():
    run_ranks(check_memory, 2)


def check_memory(rank, world_size):
    """Counts the bytes that torch allocates and frees meanwhile."""
    run = start("fsdp2", {"make_model": lambda: Net(dims=((64, 256),) * 8)})
    train(run, 0, 1)
    largest = 4 * 64 * 256
    for get in (
        lambda: dmuon.get_model_state_dict(run.model),
        lambda: dmuon.get_optimizer_state_dict(run.model, run.optimizer),
    ):
        peaks = []
        for _ in range(3):  # what a thread of the backend frees is not seen: it adds to a peak
            with torch.profiler.profile(profile_memory=True) as profile:
                kept = get()
            peaks.append(peak_bytes(profile))
            assert kept == {} or rank == 0
        if rank:
            assert min(peaks) <= 6 * largest, peaks  # of 16 such matrices


def peak_bytes(profile):
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# torch.optim -----------------------------------------------------------------------------------


def test_torchs_muon_and_adamw_load_ours_and_we_theirs(tmp_path):
    run_ranks(check_torch, 2, str(tmp_path))


SETTINGS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


def torch_optimizers(model):
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if in_blocks(n, p)]
    others = [p for n, p in named.items() if not in_blocks(n, p)]
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", nesterov=True, **SETTINGS)
    return muon, torch.optim.AdamW(others, lr=1e-3, weight_decay=0.01)


def check_torch(rank, world_size, root):
    """Momenta mean the same afterwards: ours is a sum, torch's a mean."""
    backend = dmuon.NewtonSchulz("direct", coefficients=dmuon.JORDAN_COEFFICIENTS)
    run = start("fsdp2", muon=SETTINGS | {"ns_backend": backend})
    train(run, 0, 3)
    weights = dmuon.get_model_state_dict(run.model, rank0_only=False)
    ours = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)
    theirs = dmuon.get_optimizer_state_dict(
        run.model, run.optimizer, rank0_only=False, as_torch=True
    )
    plain = Net()
    plain.load_state_dict(weights)
    optimizers = torch_optimizers(plain)
    set_optimizer_state_dict(plain, optimizers, theirs)
    for name, p in plain.named_parameters():
        optimizer = optimizers[0 if in_blocks(name, p) else 1]
        if in_blocks(name, p):
            want = 0.1 * ours["state"][name]["momentum_buffer"]
            torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], want)
        else:
            assert_same(optimizer.state[p], ours["state"][name])
    back = get_optimizer_state_dict(plain, optimizers)
    dmuon.set_optimizer_state_dict(run.model, run.optimizer, back)
    again = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)
    for name, entry in ours["state"].items():
        assert_close(again["state"][name], entry, 1e-5)
    assert_same_update(run, plain, optimizers[0])


def size_of(state):
    """Of a momentum as a running sum."""
    return 10 * state["momentum_buffer"].std() if state else 0.0


def assert_same_update(run, plain, muon):
    """The next gradient is as large as the momentum, so that a momentum of another scale would show. Torch's
    Newton-Schulz runs in bfloat16, hence the tolerance."""
    g = torch.Generator().manual_seed(3)
    for p in plain.parameters():
        p.grad = torch.randn(p.shape, generator=g) * size_of(muon.state.get(p))
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    muon.step()
    (0.0 * run.loss(9, run.ranks[0])).backward()
    for param in dmuon.get_owned_params(run.model, run.ranks[0]):
        param.parameter.grad = plain.get_parameter(param.fqn).grad.clone()
    run.step()
    after = full_weights(run.model)
    for name, p in plain.named_parameters():
        if in_blocks(name, p):
            ours, theirs = after[name] - before[name], p.detach() - before[name]
            error = (ours - theirs).norm() / theirs.norm()
            assert error <= 0.1, f"{name}: {error:.3f}"


def test_after_a_forward_that_leaves_the_root_whole():
    run_ranks(check_after_forward, 2)


def check_after_forward(rank, world_size):
    """FSDP2 puts the root's parameters away in backward, and an evaluation has none."""
    run = start("fsdp2")
    train(run, 0, 1)
    want = full_weights(run.model)
    evaluate(run)
    got = dmuon.get_model_state_dict(run.model, rank0_only=False)
    assert_same(got, want)
    evaluate(run)
    dmuon.set_model_state_dict(run.model, {name: w + 1 for name, w in got.items()})
    assert_same(full_weights(run.model), {name: w + 1 for name, w in want.items()})


@torch.no_grad()
def evaluate(run):
    run.model(run.batch(0, run.ranks[0])[0])

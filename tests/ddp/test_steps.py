"""The moments of a step, and what it costs: calls of Newton-Schulz, bytes."""

import copy
from functools import partial

import dmuon
import torch
from torch.optim.swa_utils import AveragedModel

from tests.support.ddp import BOTH, assert_replicas_equal, by_both, check_ddp, setup_ddp, wrapped
from tests.support.meshes import SQUARE, flat, on, run_on
from tests.support.models import Net, in_blocks
from tests.support.parity import (
    assert_all_raise,
    assert_same,
    full_weights,
    gathered,
    read_between_steps,
    three_steps,
    total,
)
from tests.support.tp_models import MIXED, subject


def weights_of_all(run):
    """As the ranks hold them, after what is in flight."""
    assert_replicas_equal(run)
    return full_weights(run.model)


# The asynchronous publish ----------------------------------------------------------------------


@on([flat(2), flat(3), SQUARE])
def test_whoever_reads_after_an_asynchronous_step_sees_the_whole_update(layout):
    run_on(layout, check_readers)


def check_readers(rank, layout):
    seen = [list(read_after_each_step(layout, publish)) for publish in (True, False)]
    for asynchronous, synchronous in zip(*seen, strict=True):
        assert_same(asynchronous, synchronous)
    assert not torch.equal(seen[0][0]["output"], seen[0][-1]["output"]), "it trains"


def read_after_each_step(layout, asynchronous):
    run = setup_ddp(layout, muon={"lr": 0.5, "replicate_async": asynchronous}, **subject(layout))
    average = AveragedModel(run.model, avg_fn=lambda average, mine, count: (average + mine) / 2)
    readers = (evaluated, saved, local_state, copied, stepped_again, waited)
    return read_between_steps(run, (*readers, partial(averaged, average), copied, evaluated))


def copied(run, x):
    run.optimizer.zero_grad()  # torch cannot copy a DTensor whose local tensor is a view, as these gradients are
    return cloned(copy.deepcopy(run.model).state_dict())


def averaged(average, run, x):
    average.update_parameters(run.model)
    return cloned(dict(average.module.named_parameters()))


def evaluated(run, x):
    with torch.no_grad():
        return {"output": run.called(x)}


def saved(run, x):
    return dmuon.get_model_state_dict(run.model, rank0_only=False)


def local_state(run, x):
    return cloned(run.model.state_dict())


def stepped_again(run, x):
    run.optimizer.step()
    return full_weights(run.model)


def waited(run, x):
    dmuon.wait_all_replicate_broadcasts(run.model)
    return cloned(dict(run.model.named_parameters()))


def cloned(tensors):
    whole = (getattr(t, "full_tensor", lambda t=t: t)() for t in tensors.values())
    return {name: t.detach().clone() for name, t in zip(tensors, whole, strict=True)}


@on([flat(2), flat(3)])
def test_two_models_in_one_job(layout):
    run_on(layout, check_two_models)


def check_two_models(rank, layout):
    """Trained in turn: what one publishes is in flight when the other does."""
    alone = [setup_ddp(layout, muon={"lr": lr}) for lr in (0.02, 0.05)]
    for run in alone:
        for step in range(6):
            run.train(step)
        dmuon.wait_all_replicate_broadcasts(run.model)
    together = [setup_ddp(layout, muon={"lr": lr}) for lr in (0.02, 0.05)]
    for step in range(6):
        for run in together:
            run.train(step)
    for run, reference in zip(together, alone, strict=True):
        assert_same(weights_of_all(run), weights_of_all(reference))


# More and fewer steps --------------------------------------------------------------------------


@by_both()
@on([flat(2), flat(4)])
def test_a_step_twice_on_the_same_gradients(layout, by):
    run_on(layout, check_twice, by)


def check_twice(rank, layout, by):
    check_ddp(rank, layout, stepping_twice, wrap=BOTH[by])


def test_a_step_twice_with_tensor_parallelism():
    run_on(SQUARE, check_twice_tp)


def check_twice_tp(rank, layout):
    check_ddp(rank, layout, stepping_twice, **MIXED)


def stepping_twice(run):
    for step in range(2):
        for rank in run.ranks:
            run.loss(step, rank).backward()
        run.optimizer.step()
        run.steps += 1
        run.step()


@on([flat(2), SQUARE])
def test_a_step_without_a_gradient_changes_nothing(layout):
    run_on(layout, check_no_gradient)


def check_no_gradient(rank, layout):
    run = setup_ddp(layout, **subject(layout))
    three_steps(run)
    before = weights_of_all(run)
    run.optimizer.step()
    assert_same(weights_of_all(run), before)
    assert total(dmuon.report(run.model)["ns_calls_last_step"]) == 0
    run.train(3)
    after = weights_of_all(run)
    assert not any(torch.equal(after[name], w) for name, w in before.items())


# Not finite ------------------------------------------------------------------------------------


@by_both()
@on([flat(2), flat(3)])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(layout, by):
    run_on(layout, check_nonfinite, by)


@on([SQUARE])
def test_a_gradient_that_is_not_finite_with_tensor_parallelism(layout):
    run_on(layout, check_nonfinite, "replicate")


def check_nonfinite(rank, layout, by):
    for policy in ("raise", "skip"):
        run = setup_ddp(layout, wrap=BOTH[by], muon={"nonfinite": policy}, **subject(layout))
        run.train(0)
        before = weights_of_all(run)
        spoilt = run.ranks[0] == 1
        (run.loss(1, run.ranks[0]) * (float("nan") if spoilt else 1.0)).backward()
        if policy == "raise":
            assert_all_raise(run.optimizer.step, "RuntimeError", "weight", "not finite")
        else:
            run.optimizer.step()
        assert_same(weights_of_all(run), before)
        run.optimizer.zero_grad()
        run.train(2)
        assert all(w.isfinite().all() for w in weights_of_all(run).values())


# Newton-Schulz and bytes -----------------------------------------------------------------------


@by_both()
@on([flat(2), flat(3), flat(4)])
def test_newton_schulz_once_and_no_byte_above_the_bound(layout, by):
    run_on(layout, check_figures, by)


def check_figures(rank, layout, by):
    """A sum at one rank and a copy on all each move P from N-1 ranks; with it travels one float
    per matrix that says whether it has a gradient."""
    run = setup_ddp(layout, make_model=lambda: Net(dims=((16, 32),) * 4), wrap=BOTH[by])
    three_steps(run)
    before = sent_by_channel(run.model)
    run.train(3)
    after = sent_by_channel(run.model)
    sent = {channel: after[channel] - size for channel, size in before.items()}
    matrices = [p for n, p in run.model.named_parameters() if in_blocks(n, p)]
    least = 4 * (layout.ranks - 1) * sum(p.numel() for p in matrices)
    flags = 4 * (layout.ranks - 1) * len(matrices)
    assert sent.pop("control") < 1000, "agreements, whatever the size of the model"
    assert sent.pop("publish") == least
    assert least <= sent.pop("replicate_reduce") <= least + flags
    assert not any(sent.values()), sent
    report = dmuon.report(run.model)
    assert report["ns_calls_last_step"] == len(dmuon.get_owned_params(run.model, rank))
    assert total(report["ns_calls_last_step"]) == len(matrices)
    assert total(report["ns_calls"]) == 4 * len(matrices)


def sent_by_channel(model):
    """Of the job, in bytes since setup."""
    dmuon.wait_all_replicate_broadcasts(model)
    sent = dmuon.report(model)["sent_bytes_by_channel"]
    return {channel: total(sent[channel]) for channel in sorted(sent)}


def test_newton_schulz_once_over_all_replicas_and_tp_ranks():
    run_on(SQUARE, check_calls_tp)


def check_calls_tp(rank, layout):
    run = setup_ddp(layout, **MIXED)
    three_steps(run)
    matrices = len(dmuon.get_dedicated_params(run.model))
    assert total(dmuon.report(run.model)["ns_calls_last_step"]) == matrices
    owners = {p.owner_rank for p in dmuon.get_dedicated_params(run.model)}
    assert owners == set(range(layout.ranks)), "an idle rank"


def test_state_lies_on_the_owner_alone():
    run_on(flat(3), check_state)


def check_state(rank, layout):
    run = setup_ddp(layout, wrap=wrapped)
    three_steps(run)
    holders = gathered(
        {p.fqn for p in dmuon.get_dedicated_params(run.model) if p._owned_data is not None}
    )
    assert sorted(n for names in holders for n in names) == sorted(
        p.fqn for p in dmuon.get_dedicated_params(run.model)
    )
    for p in dmuon.get_dedicated_params(run.model):
        momentum = run.optimizer.state[p.parameter]["momentum_buffer"]
        assert isinstance(momentum, dmuon.OwnedTensor) == (not p.is_owner)

"""What `dmuon.report` looks like, and that the times of a step add up. No time is held against a limit."""

import json
import math
import sys
import time

import dmuon
import pytest
from dmuon import _C, report_table
from dmuon.step_picture import overlap
from dmuon.step_report import Report
from torch import nn

from tests.support.ddp import put_under_ddp, replicated
from tests.support.meshes import dp_tp, flat, hsdp, on, run_on
from tests.support.models import Net
from tests.support.parity import gathered, setup, three_steps, total
from tests.support.ranks import run_ranks
from tests.support.tp_models import MIXED
from tests.support.zero import STAGES, ds_config, make_engine, train

WAITING = set(_C.WAITING_PHASES)


def assert_adds_up(report):
    """Of one step of one rank."""
    step = report["last_step"]
    phases, whole = step["phases"], step["seconds"]
    assert whole > 0 and all(seconds >= 0 for seconds in phases.values())
    assert math.isclose(sum(phases.values()), whole, rel_tol=1e-9)
    waiting = sum(phases[name] for name in WAITING)
    assert math.isclose(step["waiting_seconds"], waiting, rel_tol=1e-9, abs_tol=1e-12)
    for name, beside in step["beside"].items():
        assert 0 <= beside["hidden_seconds"] <= beside["seconds"] <= whole * (1 + 1e-9), name
    assert_fills(report.timeline, step)


def assert_fills(timeline, step):
    """The training thread's spans follow each other from the step's begin to its end; what goes on beside it has
    the times of the sums."""
    at, phases, beside, waits = 0.0, {}, {}, []
    for is_beside, what, begin, end in timeline:
        assert begin < end
        if is_beside:
            beside.setdefault(what, []).append((begin, end))
            continue
        assert math.isclose(begin, at, abs_tol=1e-12)
        at, phases[what] = end, phases.get(what, 0.0) + end - begin
        if what in WAITING:
            waits.append((begin, end))
    assert math.isclose(at, step["seconds"], rel_tol=1e-9)
    for name, seconds in step["phases"].items():
        assert math.isclose(phases.get(name, 0.0), seconds, rel_tol=1e-6, abs_tol=1e-9), name
    for name, times in beside.items():
        assert_same_sum(times, step["beside"][name]["seconds"])
        hidden = step["beside"][name]["seconds"] - step["beside"][name]["hidden_seconds"]
        assert_same_sum(overlap(times, waits), hidden)


def assert_same_sum(spans, seconds):
    assert math.isclose(sum(e - b for b, e in spans), seconds, rel_tol=1e-6, abs_tol=1e-9)


# Every runtime ---------------------------------------------------------------------------------


@on([flat(2), hsdp(2, 2), hsdp(2, 1)])
def test_the_times_of_a_step_add_up(layout):
    run_on(layout, check_times)


def check_times(rank, layout):
    run = setup(layout)
    three_steps(run)
    report = dmuon.report(run.model)
    assert_adds_up(report)
    for phase in ("forward", "backward", "agreement", "checks", "adamw", "other"):
        assert report["last_step"]["phases"][phase] > 0, phase
    fetches = "shard" not in layout.names or dict(layout.axes)["shard"] > 1
    assert report["last_step"]["beside"]["reduce"]["seconds"] > 0
    assert total(report["last_step"]["phases"]["newton_schulz"]) > 0
    assert not fetches or report["last_step"]["phases"]["forward_fetch"] > 0


@on([flat(2), dp_tp(1, 2)])
def test_under_ddp(layout):
    run_on(layout, check_ddp)


def check_ddp(rank, layout):
    tp = MIXED if layout.tp > 1 else {}
    run = setup(layout, **tp | {"put": put_under_ddp, "wrap": replicated})
    three_steps(run)
    report = dmuon.report(run.model)
    assert report["runtime"] == "DDP"
    assert report["last_step"]["phases"]["forward_fetch"] == 0, "resident weights"
    assert_adds_up(report)


@pytest.mark.parametrize("muon", [{}, {"tp_distributed_gram": True}], ids=["whole", "in shards"])
def test_with_tensor_parallelism(muon):
    run_on(dp_tp(1, 2), check_tp, muon)


def check_tp(rank, layout, muon):
    if muon:
        muon = {**muon, "tp_distributed_gram_policy": "always"}
    run = setup(layout, **MIXED, muon=muon)
    three_steps(run)
    report = dmuon.report(run.model)
    assert_adds_up(report)
    assert report["last_step"]["phases"]["tp_exchange"] > 0
    assert report["last_step"]["beside"]["tp"]["seconds"] > 0
    assert "tensor parallel" in str(report)


@pytest.mark.parametrize("stage", STAGES)
def test_under_zero(stage):
    run_ranks(check_zero, 2, stage, limit_s=90)


def check_zero(rank, world_size, stage):
    engine = make_engine(ds_config(stage, gas=2))
    assert dmuon.report(engine)["last_step"] is None
    train(engine, 3)
    report = dmuon.report(engine)
    assert report["runtime"] == "DeepSpeed ZeRO" and "DeepSpeed ZeRO" in str(report)
    assert report["steps"] == 3, "two micro-batches make one step"
    assert_adds_up(report)
    assert (report["last_step"]["phases"]["forward_fetch"] > 0) == (stage == 3)


# Where time shows ------------------------------------------------------------------------------

PAUSE = 0.05


class Slow(nn.Module):
    """Sleeps in forward, and before the backward of what follows it."""

    def __init__(self):
        super().__init__()
        self.forward_s = self.backward_s = 0.0

    def forward(self, x):
        time.sleep(self.forward_s)
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(self.backward_s))
        return x


def with_pauses():
    model = Net()
    model.blocks[1].tanh = Slow()
    model.blocks[1].register_forward_pre_hook(lambda block, args: (block.tanh(args[0]),))
    return model


def test_a_pause_shows_in_the_phase_it_is_in():
    run_ranks(check_pauses, 2)


def check_pauses(rank, world_size):
    """A sleep lasts at least as long as it is told to, on the same clock."""
    run = setup(world_size, make_model=with_pauses)
    three_steps(run)
    slow = run.model.blocks[1].tanh
    slow.forward_s, slow.backward_s = PAUSE, 2 * PAUSE
    loss = run.loss(3, rank)
    loss.backward()
    time.sleep(3 * PAUSE)
    run.step()
    phases = dmuon.report(run.model)["last_step"]["phases"]
    assert phases["forward"] >= PAUSE
    assert phases["backward"] >= 2 * PAUSE
    assert phases["other"] >= 3 * PAUSE


def test_a_slow_peer_shows_as_waiting():
    run_ranks(check_slow_peer, 2, limit_s=60)


def check_slow_peer(rank, world_size):
    """Longer pauses until the other rank, which may be held up itself, has waited for half of one."""
    run = setup(world_size, make_model=with_pauses)
    three_steps(run)
    for step in range(3, 9):
        pause = PAUSE * 2 ** (step - 3)
        run.model.blocks[1].tanh.forward_s = pause if rank == 0 else 0.0
        run.train(step)
        report = dmuon.report(run.model)
        assert_adds_up(report)
        slow, other = gathered(report["last_step"])
        assert slow["phases"]["forward"] >= pause
        if other["waiting_seconds"] >= pause / 2:
            return
    raise AssertionError(f"the slow rank's pauses do not show: {slow}, {other}")


# Before, between, after ------------------------------------------------------------------------


def test_before_the_first_step():
    run_ranks(check_before, 2)


def check_before(rank, world_size):
    run = setup(world_size)
    for _ in range(2):
        report = dmuon.report(run.model)
        assert report["last_step"] is None and report.timeline == ()
        assert "no step has been taken" in str(report)
        assert "no step has been taken" in report._repr_html_()
        with pytest.raises(
            ValueError, match=r"nothing to plot: no step has been taken\. Call step"
        ):
            report.plot()
        run.loss(0, rank).backward()


def test_after_a_pass_and_a_step_that_failed():
    run_ranks(check_failed, 2)


def check_failed(rank, world_size):
    run = setup(world_size, put=put_under_ddp, wrap=replicated)
    run.train(0)
    before = dmuon.report(run.model)["last_step"]
    hook = run.model.blocks[0].register_forward_hook(refuse_backward)
    with pytest.raises(RuntimeError, match="refused"):
        run.loss(1, rank).backward()
    hook.remove()
    run.optimizer.zero_grad()
    assert dmuon.report(run.model)["last_step"] == before, "no step has ended"
    x, y = run.batch(1, rank)
    nn.functional.mse_loss(run.called(x * math.nan), y).backward()
    with pytest.raises(RuntimeError, match="not finite"):
        run.optimizer.step()
    assert dmuon.report(run.model)["last_step"] == before, "a step that raises ends none"
    run.optimizer.zero_grad()
    run.train(2)
    report = dmuon.report(run.model)
    assert report["aborted_passes"] == 1 and "1 backward passes ended with an exc" in str(report)
    assert report["last_step"] != before
    assert_adds_up(report)


def refuse_backward(block, args, out):
    out.register_hook(refuse)


def refuse(gradient):
    raise RuntimeError("refused")


def test_a_step_that_changes_nothing_is_a_step():
    run_ranks(check_empty_step, 2)


def check_empty_step(rank, world_size):
    run = setup(world_size)
    run.train(0)
    run.optimizer.step()
    report = dmuon.report(run.model)
    assert_adds_up(report)
    assert report["last_step"]["phases"]["forward"] == 0
    assert "1 of them updated nothing" in str(report)


# What it looks like ----------------------------------------------------------------------------


def test_a_report_is_a_dictionary_that_prints_and_travels(tmp_path):
    run_ranks(check_looks, 2, str(tmp_path))


def check_looks(rank, world_size, folder):
    run = setup(world_size)
    three_steps(run)
    report = dmuon.report(run.model)
    assert isinstance(report, dict) and report["steps"] == 3
    assert json.loads(json.dumps(report)) == json.loads(report.to_json(indent=1)) == report
    text = str(report)
    assert text == repr(report) and max(map(len, text.splitlines())) <= report_table.WIDTH
    for said in ("rank ", "FSDP2, shard 2, on cpu", "load by rank", "blocks.1.down.weight", "░"):
        assert said in text, said
    assert "blocks.1.down.weight" in report._repr_html_()
    theirs = gathered(report)[1 - rank]
    assert theirs.timeline and theirs["rank"] == 1 - rank, "as a Report"
    assert str(theirs).startswith("rank ")
    picture = f"{folder}/{rank}.svg"
    figure = theirs.plot(picture)
    drawn = figure.axes[0].get_yticklabels() + figure.axes[1].get_yticklabels()
    names = {label.get_text() for label in drawn}
    assert {"training thread", "reductions", "forward", "agreement"} <= names
    with open(picture) as file:
        assert "<svg" in file.read()


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    step = {"seconds": 1.0, "waiting_seconds": 0.0, "phases": {}, "beside": {}}
    step["beside"] = {what: {"seconds": 0.0} for what in report_table.BESIDE}
    report = Report({"last_step": step, "rank": 0, "steps": 1, "device": "cpu"})
    with pytest.raises(
        ImportError, match="plot needs the package matplotlib: pip install matplotlib"
    ):
        report.plot()


def test_layers_alike_share_a_line():
    parameters = [
        {
            "name": f"model.layers.{layer}.self_attn.{part}.weight",
            "shape": [4096, columns],
            "owner": (7 * layer + i) % 64,
            "kernel": "gram",
            "route": "muon",
        }
        for layer in range(200)
        for i, (part, columns) in enumerate((("q_proj", 4096), ("k_proj", 1024), ("o_proj", 4096)))
    ]
    _, *lines = report_table.parameter_rows(parameters)
    assert lines[1] == (
        "model.layers.*.self_attn.k_proj.weight",
        "200",
        "4096 x 1024",
        "0-63",
        "gram",
    )
    assert len(lines) == 3
    few = report_table.parameter_rows(parameters[:3])
    assert few[1][:2] == ("model.layers.0.self_attn.q_proj.weight", "1")


def test_lines_of_long_names_fit():
    name = "a_very_long_module_name." * 8 + "weight"
    parameters = [
        {"name": f"{name}{'x' * i}", "shape": [64, i], "owner": 0, "kernel": "", "route": "adamw"}
        for i in range(1, 60)
    ]
    lines = report_table.columns(report_table.parameter_rows(parameters))
    assert max(map(len, lines)) <= report_table.WIDTH
    assert "and 35 lines more" in lines[-1]
    assert lines[1].split()[0].startswith("a_very") and "weightx" in lines[1]


def test_ranges_of_owners():
    assert report_table.ranges({3, 0, 1, 2, 7}) == "0-3, 7"
    assert report_table.ranges(range(0, 20, 2)) == "0, 2, 4, 6 and 6 more"

"""Every file of examples/quickstart, which docs/quickstart.md shows, trains as one process does."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from unittest import mock

import pytest

from tests.support.ranks import PATIENCE, ROOT, run_ranks

FOLDER = ROOT / "examples" / "quickstart"
# File, and the number of processes in its first line.
RANKS = {"fsdp2": 4, "hsdp_tp": 8, "ddp": 4, "ddp_tp": 4, "zero": 2}
# Losses are printed to four decimals: one unit of the last one.
TOLERANCE = 1e-4
STEPS = 20

sys.path.append(str(FOLDER))
sys.path.append(str(ROOT / "examples"))


def test_every_file_is_tried():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*RANKS, "tiny"}


@pytest.mark.parametrize("name", RANKS)
def test_it_trains_as_one_process_does(name, one_process, tmp_path):
    command = f"--nproc-per-node {RANKS[name]} examples/quickstart/{name}.py"
    assert command in (FOLDER / f"{name}.py").read_text().splitlines()[0]
    printed = run_ranks(run_file, RANKS[name], name, tmp_path, limit_s=60.0)[0]
    assert losses_in(printed) == pytest.approx(one_process, rel=0, abs=TOLERANCE)


def test_the_command_of_the_page_trains(one_process, tmp_path):
    """The first file in interpreters of its own, as a reader starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(FOLDER / "fsdp2.py")],
        cwd=tmp_path,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=90 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert losses_in(done.stdout) == pytest.approx(one_process, rel=0, abs=TOLERANCE)
    assert (tmp_path / "weights.pt").exists()


def losses_in(printed):
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]


@pytest.fixture(scope="module")
def one_process():
    """The losses of plain PyTorch, whole batches, the matrices by the Muon of examples/."""
    import torch
    from one_process import Muon
    from tiny import Tiny, batch, is_hidden_matrix

    model, losses = Tiny(), []
    named = list(model.named_parameters())
    optimizers = [
        Muon([p for name, p in named if is_hidden_matrix(name, p)], lr=0.02),
        torch.optim.AdamW([p for name, p in named if not is_hidden_matrix(name, p)], lr=0.01),
    ]
    for step in range(STEPS):
        model.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10, "the model learns"
    return losses


def run_file(rank, world_size, name, folder):
    """What the file prints. The pool has made the processes' group, and keeps it."""
    import torch.distributed as dist

    if name == "zero":
        from tests.support.zero import deepspeed_ready

        deepspeed_ready()
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", [name]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return printed.getvalue()

"""20 steps are the same bits as 10 steps, save_checkpoint, new processes, load_checkpoint and 10 more."""

import dmuon
import pytest
import torch

from tests.checkpoints.kinds import KINDS, assert_same, layout_of, start, whole
from tests.checkpoints.kinds import train as train_plainly
from tests.support.meshes import run_on
from tests.support.models import Net
from tests.support.ranks import retire, run_fresh, run_ranks

HALF, ALL = 10, 20


def begin(kind):
    run = start(kind, muon={"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
    schedulers = [
        torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.2, total_iters=8),
        torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [4, 7], gamma=0.5),
    ]
    return run, torch.optim.lr_scheduler.SequentialLR(run.optimizer, schedulers, [8])


def train(run, scheduler, first, last):
    """Two micro-batches a step, the first one without communication."""
    for step in range(first, last):
        for part in range(2):
            for rank in run.ranks:
                if part == 0:
                    with run.no_sync():
                        run.loss(step, rank, part, 2).backward()
                else:
                    run.loss(step, rank, part, 2).backward()
        run.clip(1.0)
        run.step()
        scheduler.step()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fsdp4"])
def test_resuming_in_new_processes_changes_no_bit(kind, tmp_path):
    layout = layout_of(kind)
    run_on(layout, check_first_half, kind, str(tmp_path))
    retire(layout.ranks)
    run_on(layout, check_second_half, kind, str(tmp_path))


def check_first_half(rank, layout, kind, root):
    run, scheduler = begin(kind)
    train(run, scheduler, 0, HALF)
    extra = {"scheduler": scheduler.state_dict()}
    dmuon.save_checkpoint(root, HALF, run.model, run.optimizer, extra=extra)
    train(run, scheduler, HALF, ALL)
    remember(run, root)


def check_second_half(rank, layout, kind, root):
    run, scheduler = begin(kind)
    found = dmuon.load_checkpoint(root, run.model, run.optimizer)
    scheduler.load_state_dict(found.extra["scheduler"])
    train(run, scheduler, found.step, ALL)
    compare(run, root)


def remember(run, root):
    state = whole(run)
    if torch.distributed.get_rank() == 0:
        torch.save(state, f"{root}/expected")


def compare(run, root):
    assert_same(whole(run), torch.load(f"{root}/expected", weights_only=True))


SCRIPT = """
import torch.distributed as dist
from tests.checkpoints import test_resume

dist.init_process_group("gloo")
half = test_resume.{half}
half(dist.get_rank(), None, "hsdp", {root!r})
dist.barrier()
"""


def test_a_job_started_anew_changes_no_bit_either(tmp_path):
    """Interpreters of their own, as a launcher starts them."""
    for half in ("check_first_half", "check_second_half"):
        run_fresh(SCRIPT.format(half=half, root=str(tmp_path)), 4)


# Dropout ---------------------------------------------------------------------------------------


class Dropping(Net):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.5)


def begin_dropping(kind):
    run = start(kind, {"make_model": Dropping}, muon={"lr": 0.05})
    torch.manual_seed(100 + torch.distributed.get_rank())  # each rank drops others
    return run


def test_dropout_goes_on_as_it_would_have(tmp_path):
    for check in (check_dropout_first, check_dropout_second):
        run_ranks(check, 2, str(tmp_path))
        retire(2)
    run_ranks(check_other_ranks, 1, str(tmp_path))


def check_dropout_first(rank, world_size, root):
    run = begin_dropping("fsdp2")
    train_plainly(run, 0, HALF)
    mine = {"rng": torch.get_rng_state(), "rank": rank}
    dmuon.save_checkpoint(root, HALF, run.model, run.optimizer, rank_extra=mine)
    train_plainly(run, HALF, ALL)
    remember(run, root)


def check_dropout_second(rank, world_size, root):
    run = begin_dropping("fsdp2")
    found = dmuon.load_checkpoint(root, run.model, run.optimizer)
    assert found.rank_extra["rank"] == rank
    torch.set_rng_state(found.rank_extra["rng"])
    train_plainly(run, HALF, ALL)
    compare(run, root)


def check_other_ranks(rank, world_size, root):
    run = begin_dropping("alone")
    found = dmuon.load_checkpoint(root, run.model, run.optimizer)
    assert (found.step, found.rank_extra) == (HALF, None)

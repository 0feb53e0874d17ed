"""Dedicated matrices and their momenta between ZeRO and the other runtimes, by torch.distributed.checkpoint."""

import dmuon
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoints import kinds
from tests.support.models import Net
from tests.support.parity import assert_all_raise, assert_same
from tests.support.ranks import run_ranks
from tests.support.zero import make_engine, train, weights
from tests.support.zero_checkpoints import config_of, momenta, trained

KINDS = {"fsdp2": 2, "hsdp": 4, "ddp": 2}
# The same matrices as under ZeRO.
CHOSEN = {"make_model": Net}


def dedicated_of_engine(engine):
    names = [p.param_name for p in dmuon.get_dedicated_params(engine)]
    held = weights(engine)
    return {n: held[n] for n in names} | {f"{n}: m": m for n, m in momenta(engine).items()}


def dedicated_of_run(run):
    names = [p.param_name for p in dmuon.get_dedicated_params(run.model)]
    whole = kinds.whole(run)
    return {n: whole[n] for n in names} | {f"{n}: m": whole[f"{n}: momentum_buffer"] for n in names}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_from_zero_and_back(kind, stage, tmp_path):
    folder = str(tmp_path)
    want = run_ranks(check_zero_saves, 2, stage, folder)[0]
    got = run_ranks(check_other_loads, KINDS[kind], kind, folder)[0]
    assert_same(got["loaded"], want)
    back = run_ranks(check_zero_loads, 2, stage, folder)[0]
    assert_same(back, got["trained"])


def check_zero_saves(rank, world_size, stage, folder):
    engine = trained(config_of(stage))
    state = dmuon.state_dict(engine, engine.optimizer, dedicated_only=True)
    dcp.save({"app": state}, checkpoint_id=f"{folder}/zero")
    return dedicated_of_engine(engine)


def check_other_loads(rank, world_size, kind, folder):
    run = kinds.start(kind, CHOSEN)
    state = dmuon.state_dict(run.model, run.optimizer, dedicated_only=True)
    dcp.load({"app": state}, checkpoint_id=f"{folder}/zero")
    loaded = dedicated_of_run(run)
    kinds.train(run, 0, 1)
    dcp.save({"app": dmuon.state_dict(run.model, run.optimizer)}, checkpoint_id=f"{folder}/other")
    return {"loaded": loaded, "trained": dedicated_of_run(run)}


def check_zero_loads(rank, world_size, stage, folder):
    engine = make_engine(config_of(stage), seed=8)
    state = dmuon.state_dict(engine, engine.optimizer, dedicated_only=True)
    dcp.load({"app": state}, checkpoint_id=f"{folder}/other")
    got = dedicated_of_engine(engine)
    train(engine, 1)
    return got


def test_one_process_reads_it(tmp_path):
    want = run_ranks(check_zero_saves, 2, 3, str(tmp_path))[0]
    dcp_to_torch_save(f"{tmp_path}/zero", f"{tmp_path}/one.pt")
    app = torch.load(f"{tmp_path}/one.pt", weights_only=True)["app"]
    states = app["optim"]["state"].items()
    got = app["model"] | {f"{n}: m": entry["momentum_buffer"] for n, entry in states}
    assert_same(got, want)


def test_what_dmuon_does_not_save_in_files_of_its_own():
    run_ranks(check_whole_is_refused, 2)


def check_whole_is_refused(rank, world_size):
    engine = make_engine(config_of(3))
    words = (
        "ValueError",
        "engine.save_checkpoint",
        "dedicated_only=True",
        "get_optimizer_state_dict",
    )
    assert_all_raise(lambda: dmuon.state_dict(engine, engine.optimizer), *words)
    assert_all_raise(lambda: dmuon.save_checkpoint("never", 0, engine, engine.optimizer), *words)

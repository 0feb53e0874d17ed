"""What an engine saves is all that training goes on from."""

import os
from functools import partial

import dmuon
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dmuon.zero import load_dedicated

from tests.support.models import Net
from tests.support.parity import assert_all_raise, assert_same
from tests.support.ranks import run_fresh, run_ranks
from tests.support.zero import SETUP, STAGES, loss_of, make_engine, train, weights
from tests.support.zero_checkpoints import config_of, momenta, read, tag_folder, trained

by_stage = pytest.mark.parametrize("stage", STAGES)
DTYPES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}},
}


@by_stage
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_goes_on_in_a_new_engine_as_if_it_had_never_stopped(stage, dtype, tmp_path):
    if dtype == "fp16" and (stage == 0 or not torch.ops.mkldnn._is_mkldnn_fp16_supported()):
        pytest.skip("DeepSpeed has no float16 here")
    run_ranks(check_goes_on, 2, stage, dtype, str(tmp_path), limit_s=90)


def check_goes_on(rank, world_size, stage, dtype, folder):
    config = config_of(stage, **DTYPES[dtype])
    engine = trained(config)
    engine.save_checkpoint(folder, client_state={"note": "kept"})
    saved = weights(engine)
    train(engine, 2, first=2)
    other = make_engine(config, seed=8)
    path, client_state = other.load_checkpoint(folder)
    assert path is not None and client_state["note"] == "kept" and other.global_steps == 2
    assert_same(weights(other), saved)
    train(other, 2, first=2)
    assert_same(weights(other), weights(engine))


def test_and_in_new_processes(tmp_path):
    run_ranks(check_saves_all_stages, 2, str(tmp_path), limit_s=90)
    run_fresh(f"FOLDER = {str(tmp_path)!r}\n{GOES_ON}", 2)


def check_saves_all_stages(rank, world_size, folder):
    for stage in STAGES:
        engine = trained(config_of(stage))
        engine.save_checkpoint(f"{folder}/{stage}")
        train(engine, 1, first=2)
        want = weights(engine)
        if rank == 0:
            torch.save(want, f"{folder}/{stage}/want.pt")


GOES_ON = f"""
{SETUP}
import torch
from tests.support.zero import make_engine, train, weights
from tests.support.zero_checkpoints import config_of
from tests.support.weights import assert_same
for stage in {STAGES}:
    engine = make_engine(config_of(stage), seed=9)
    engine.load_checkpoint(f"{{FOLDER}}/{{stage}}")
    train(engine, 1, first=2)
    assert_same(weights(engine), torch.load(f"{{FOLDER}}/{{stage}}/want.pt"))
torch.distributed.destroy_process_group()
"""


@by_stage
def test_weights_alone(stage, tmp_path):
    run_ranks(check_weights_alone, 2, stage, str(tmp_path), limit_s=90)


def check_weights_alone(rank, world_size, stage, folder):
    """Of whichever of DeepSpeed's two keywords; optimizer states stay as they are."""
    engine = trained(config_of(stage))
    engine.save_checkpoint(folder)
    for keywords in (
        {"load_optimizer_states": False},
        {"load_module_only": True, "load_optimizer_states": False},
        {"load_module_only": True},
    ):
        other = make_engine(config_of(stage), seed=8)
        other.load_checkpoint(folder, **keywords)
        assert_same(weights(other), weights(engine))
        assert all(not m.any() for m in momenta(other).values())
        train(other, 1, first=2)


@by_stage
def test_saving_changes_nothing(stage, tmp_path):
    run_ranks(check_saving_changes_nothing, 2, stage, str(tmp_path), limit_s=90)


def check_saving_changes_nothing(rank, world_size, stage, folder):
    """Right after a step, whose updates are still on their way, and between micro-batches."""
    plain, saving = make_engine(config_of(stage)), make_engine(config_of(stage))
    train(plain, 3)
    for step in range(3):
        for part in range(2):
            saving.backward(loss_of(saving, step, part, 2))
            saving.save_checkpoint(folder, tag=f"between{step}{part}")
            saving.step()
            saving.save_checkpoint(folder, tag=7)
    assert_same(weights(saving), weights(plain))
    other = make_engine(config_of(stage), seed=8)
    other.load_checkpoint(folder, tag=7)
    assert_same(weights(other), weights(saving))


@by_stage
def test_the_engine_that_saved_loads(stage, tmp_path):
    run_ranks(check_same_engine_loads, 2, stage, str(tmp_path), limit_s=90)


def check_same_engine_loads(rank, world_size, stage, folder):
    engine = trained(config_of(stage))
    engine.save_checkpoint(folder)
    train(engine, 2, first=2)
    want = weights(engine)
    engine.load_checkpoint(folder)
    train(engine, 2, first=2)
    assert_same(weights(engine), want)


def test_stage_2_read_at_stage_3(tmp_path):
    run_ranks(check_other_stage, 2, str(tmp_path), limit_s=90)


def check_other_stage(rank, world_size, folder):
    engine = trained(config_of(2))
    engine.save_checkpoint(folder)
    other = make_engine(config_of(3), seed=8)
    load = partial(other.load_checkpoint, folder)
    assert_all_raise(load, "ValueError", "stage 2", "stage 3", "load_dedicated")
    model = Net()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(folder))
    other = make_engine(config_of(3), lambda: model)
    assert_same(weights(other), weights(engine))
    load_dedicated(other, folder)
    assert_same(weights(other), weights(engine))
    assert_same(momenta(other), momenta(engine))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(4, 2), (2, 3)])
def test_another_number_of_ranks(saved_on, loaded_on, stage, tmp_path):
    """The dedicated part; DeepSpeed's own has DeepSpeed's limits."""
    saved = run_ranks(check_saved_here, saved_on, stage, str(tmp_path), limit_s=90)
    run_ranks(check_loaded_here, loaded_on, stage, str(tmp_path), saved[0], limit_s=90)


def check_saved_here(rank, world_size, stage, folder):
    engine = trained(config_of(stage))
    engine.save_checkpoint(folder)
    return dedicated_weights(engine), momenta(engine)


def check_loaded_here(rank, world_size, stage, folder, saved):
    engine = make_engine(config_of(stage), seed=8)
    load_dedicated(engine, folder)
    assert_same(dedicated_weights(engine), saved[0])
    assert_same(momenta(engine), saved[1])
    train(engine, 1)


def dedicated_weights(engine):
    names = {p.param_name for p in dmuon.get_dedicated_params(engine)}
    return {name: value for name, value in weights(engine).items() if name in names}


def test_at_stage_3_a_file_of_a_rank_has_what_it_owns(tmp_path):
    run_ranks(check_files, 3, str(tmp_path), limit_s=90)


def check_files(rank, world_size, folder):
    """Rank 0's, which DeepSpeed's tools read, has all; nobody else's has another rank's."""
    engine = trained(config_of(3))
    engine.save_checkpoint(folder)
    if rank == 0:
        return
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    module = read(os.path.join(tag_folder(folder), name))["module"]
    for p in engine.dmuon.runtime.params:
        stored = module[p.param_name].untyped_storage().nbytes()
        assert stored == (4 * p.numel if p.is_owner else 4), f"{p.param_name}: {stored} bytes"

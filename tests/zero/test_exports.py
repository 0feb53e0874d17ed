"""DeepSpeed's own tools find the dedicated weights in what an engine saves."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from dmuon.zero import load_dedicated

from tests.support.models import Net
from tests.support.parity import assert_all_raise, assert_same, gathered
from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, make_engine, train, weights
from tests.support.zero_checkpoints import config_of, momenta, read, tag_folder, trained

BF16 = {"bf16": {"enabled": True}}
by_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_zero_to_fp32(stage, changes, tmp_path):
    run_ranks(check_zero_to_fp32, 2, stage, changes, str(tmp_path), limit_s=90)


def check_zero_to_fp32(rank, world_size, stage, changes, folder):
    engine = trained(config_of(stage, **changes))
    engine.save_checkpoint(folder)
    assert_same(get_fp32_state_dict_from_zero_checkpoint(folder), weights(engine))


def test_the_script_that_lies_in_the_checkpoint(tmp_path):
    run_ranks(check_saves_for_script, 2, str(tmp_path), limit_s=90)
    script = [sys.executable, "zero_to_fp32.py", ".", "out"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(script, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert_same(read(tmp_path / "out/pytorch_model.bin"), read(tmp_path / "want.pt"))


def check_saves_for_script(rank, world_size, folder):
    engine = trained(config_of(3))
    engine.save_checkpoint(folder)
    want = weights(engine)
    if rank == 0:
        torch.save(want, f"{folder}/want.pt")


@by_stage
@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_16_bit_model(stage, changes, tmp_path):
    run_ranks(check_16_bit, 2, stage, changes, str(tmp_path), limit_s=90)


def check_16_bit(rank, world_size, stage, changes, folder):
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    engine = trained(config_of(stage, zero=zero, **changes))
    assert engine.save_16bit_model(folder, "model.bin")
    dist.barrier()
    dtype = torch.bfloat16 if changes else torch.float32
    want = {name: w.to(dtype) for name, w in weights(engine).items()}
    got = read(f"{folder}/model.bin")
    assert_same(got, want)
    assert all(w.dtype == dtype for w in got.values())
    Net().load_state_dict(got)
    if stage == 3:
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        assert rank != 0 or assert_same(consolidated, want) is None


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [2, 1])
def test_a_universal_checkpoint_on_any_number_of_ranks(stage, ranks, tmp_path):
    """Refused until dmuon's files are copied, as the message says; then exact."""
    run_ranks(check_saves_for_conversion, 2, stage, str(tmp_path), limit_s=90)
    convert(tmp_path / "global_step2", tmp_path / "universal")
    run_ranks(check_universal, ranks, stage, str(tmp_path), limit_s=90)


def check_saves_for_conversion(rank, world_size, stage, folder):
    engine = trained(config_of(stage))
    engine.save_checkpoint(folder, client_state={"universal_checkpoint_info": {}})
    want = weights(engine), momenta(engine)
    if rank == 0:
        torch.save(want, f"{folder}/want.pt")


def convert(source, target):
    module = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(source), "--output_folder", str(target)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(
        [
            sys.executable,
            *module,
            *folders,
            "--num_extract_workers",
            "1",
            "--num_merge_workers",
            "1",
        ],
        env=environment,
        check=True,
        capture_output=True,
    )


def check_universal(rank, world_size, stage, folder):
    config = config_of(stage, checkpoint={"load_universal": True})
    engine = make_engine(config, seed=8)
    load = partial(engine.load_checkpoint, folder, "universal")
    assert_all_raise(load, "ValueError", "dmuon_rank_", "copy", "converted")
    if rank == 0:
        for name in os.listdir(tag_folder(folder)):
            if name.startswith("dmuon_rank_"):
                os.link(f"{tag_folder(folder)}/{name}", f"{folder}/universal/{name}")
    dist.barrier()
    load()
    want = read(f"{folder}/want.pt")
    assert_same(weights(engine), want[0])
    assert_same(momenta(engine), want[1])
    train(engine, 1, first=2)


@by_stage
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_dedicated_part_on_another_number_of_ranks(stage, ranks, tmp_path):
    run_ranks(check_saves, 2, stage, str(tmp_path), limit_s=90)
    run_ranks(check_other_ranks, ranks, stage, str(tmp_path), limit_s=90)


def check_saves(rank, world_size, stage, folder):
    engine = trained(config_of(stage))
    engine.save_checkpoint(folder)
    want = weights(engine), momenta(engine)
    if rank == 0:
        torch.save(want, f"{folder}/want.pt")


def check_other_ranks(rank, world_size, stage, folder):
    engine = make_engine(config_of(stage), seed=8)
    load = partial(engine.load_checkpoint, folder, load_optimizer_states=False)
    if stage == 3 and world_size > 2:  # DeepSpeed has no file for the third rank
        assert_all_raise(load, "ValueError", "on 2 ranks", "before initialize", "load_dedicated")
        model = Net()
        model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(folder))
        engine = make_engine(config_of(stage), lambda: model)
    else:
        load()
    load_dedicated(engine, folder)
    want = read(f"{folder}/want.pt")
    assert_same(weights(engine), want[0])
    assert_same(momenta(engine), want[1])
    owners = gathered([p.param_name for p in engine.dmuon.runtime.params if p.is_owner])
    assert sum(map(len, owners)) == len(want[1]), "a matrix has two owners"
    train(engine, 1, first=2)


def frozen_net():
    model = Net()
    for name in ("inp.weight", "blocks.0.up.weight"):
        model.get_parameter(name).requires_grad_(False)
    return model


@by_stage
def test_frozen_parameters_are_left_out_where_asked(stage, tmp_path):
    run_ranks(check_frozen, 2, stage, str(tmp_path), limit_s=90)


def check_frozen(rank, world_size, stage, folder):
    engine = make_engine(config_of(stage), frozen_net)
    train(engine, 2)
    frozen = {"inp.weight", "blocks.0.up.weight"}
    engine.save_checkpoint(folder, tag="all")
    other = make_engine(config_of(stage), frozen_net, seed=8)
    other.load_checkpoint(folder)
    assert_same(weights(other), weights(engine))
    engine.save_checkpoint(folder, tag="some", exclude_frozen_parameters=True)
    if stage:
        saved = get_fp32_state_dict_from_zero_checkpoint(
            folder, "some", exclude_frozen_parameters=True
        )
        assert saved.keys() == weights(engine).keys() - frozen
    other = make_engine(config_of(stage), frozen_net, seed=8)
    kept = {name: w for name, w in weights(other).items() if name in frozen}
    other.load_checkpoint(folder, tag="some", load_module_strict=False)
    assert_same(weights(other), weights(engine) | kept)
    train(other, 1)

"""Checkpoints that do not fit: one text on every rank, and nothing has changed."""

import os
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dmuon.zero import load_dedicated

from tests.support.parity import assert_all_raise, assert_same
from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, ds_config, make_engine, train, weights
from tests.support.zero_checkpoints import config_of, momenta, tag_folder, trained

by_stage = pytest.mark.parametrize("stage", STAGES)
FILE = "dmuon_rank_0000{}.pt"


def assert_refused(engine, load, *words):
    before, state, step = weights(engine), momenta(engine), engine.global_steps
    assert_all_raise(load, "ValueError", *words)
    assert_same(weights(engine), before)
    assert_same(momenta(engine), state)
    assert engine.global_steps == step


def on_rank(rank, call):
    if dist.get_rank() == rank:
        call()
    dist.barrier()


@by_stage
def test_files_that_are_missing_or_truncated(stage, tmp_path):
    run_ranks(check_files, 2, stage, str(tmp_path), limit_s=90)


def check_files(rank, world_size, stage, folder):
    trained(config_of(stage)).save_checkpoint(folder)
    engine = trained(config_of(stage), steps=3, seed=8)
    path = os.path.join(tag_folder(folder), FILE.format(1))
    load = partial(engine.load_checkpoint, folder)
    on_rank(0, lambda: os.truncate(path, os.path.getsize(path) // 2))
    assert_refused(engine, load, FILE.format(1), "truncated")
    on_rank(0, lambda: os.remove(path))
    assert_refused(engine, load, FILE.format(1), "missing", "blocks.")
    on_rank(0, lambda: os.remove(os.path.join(tag_folder(folder), FILE.format(0))))
    assert_refused(engine, load, FILE.format(0), "load_optimizer_states=False")
    assert_refused(engine, partial(load_dedicated, engine, folder), FILE.format(0))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    train(engine, 1)


def test_a_directory_that_one_rank_does_not_see(tmp_path):
    run_ranks(check_unseen, 2, str(tmp_path), limit_s=90)


def check_unseen(rank, world_size, folder):
    engine = trained(config_of(2))
    engine.save_checkpoint(folder)
    seen = folder if rank == 0 else folder + "/elsewhere"
    assert_refused(engine, partial(engine.load_checkpoint, seen), "latest", "Every rank")
    load = partial(engine.load_checkpoint, seen, tag="global_step2")
    assert_refused(engine, load, "rank 1 sees no such directory")
    load = partial(engine.load_checkpoint, folder, tag=f"global_step{2 + rank}")
    assert_refused(engine, load, "tag", "global_step3")
    assert_refused(engine, partial(load_dedicated, engine, folder + "/no"), "latest", "tag")
    assert engine.load_checkpoint(folder + "/no")[0] is None


def test_a_save_that_fails_on_one_rank(tmp_path):
    run_ranks(check_failing_save, 2, str(tmp_path), limit_s=90)


def check_failing_save(rank, world_size, folder):
    engine = trained(config_of(2))
    if rank == 1:
        open(f"{folder}/file", "w").close()
    place = f"{folder}/file" if rank == 1 else f"{folder}/directory"
    assert_all_raise(partial(engine.save_checkpoint, place), "ValueError", "rank 1", "file")
    save = partial(engine.save_checkpoint, folder, tag=f"tag{rank}")
    assert_all_raise(save, "ValueError", "tag", "same tag")
    engine.save_checkpoint(folder)
    train(engine, 1)


def test_files_of_two_saves(tmp_path):
    run_ranks(check_mixed, 2, str(tmp_path), limit_s=90)


def check_mixed(rank, world_size, folder):
    """As an interrupted save over an older one leaves them."""
    engine = trained(config_of(2))
    engine.save_checkpoint(folder, tag="a")
    train(engine, 1)
    engine.save_checkpoint(folder, tag="b")
    names = (f"{folder}/b/{FILE.format(1)}", f"{folder}/a/{FILE.format(1)}")
    on_rank(0, lambda: shutil.copy(*names))
    load = partial(engine.load_checkpoint, folder, tag="a")
    assert_refused(engine, load, "step 3", "step 2", FILE.format(1), "interrupted")


@by_stage
def test_one_without_dmuon(stage, tmp_path):
    run_ranks(check_plain, 2, stage, str(tmp_path), limit_s=90)


def check_plain(rank, world_size, stage, folder):
    """DeepSpeed's weights are taken, in its optimizer state there is nothing for us."""
    config = ds_config(stage)
    config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}
    del config["dmuon"]
    plain = make_engine(config)
    plain.save_checkpoint(folder, tag="t")
    engine = make_engine(ds_config(stage), seed=8)
    load = partial(engine.load_checkpoint, folder, "t")
    assert_refused(engine, load, FILE.format(0), "load_optimizer_states=False")
    engine.load_checkpoint(folder, "t", load_optimizer_states=False)
    assert_same(weights(engine), weights(make_engine(ds_config(stage), seed=7)))
    train(engine, 1)


@by_stage
def test_one_with_other_matrices(stage, tmp_path):
    run_ranks(check_other_matrices, 2, stage, str(tmp_path), limit_s=90)


def check_other_matrices(rank, world_size, stage, folder):
    saved = trained(config_of(stage, dmuon={"include": ["blocks.0.*"]}))
    saved.save_checkpoint(folder)
    engine = make_engine(config_of(stage), seed=8)
    load = partial(engine.load_checkpoint, folder)
    assert_refused(engine, load, "blocks.1.", "other parameters", "load_optimizer_states=False")
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert_same(weights(engine), weights(saved))
    train(engine, 1)


def test_weights_of_another_shape(tmp_path):
    run_ranks(check_shapes, 2, str(tmp_path), limit_s=90)


def check_shapes(rank, world_size, folder):
    saved = trained(config_of(2))
    saved.save_checkpoint(folder)
    path = os.path.join(tag_folder(folder), FILE.format(rank))
    content = torch.load(path)
    for states in content["parameters"].values():
        states["momentum_buffer"] = torch.zeros(3)
    torch.save(content, path)
    dist.barrier()
    words = ("momentum_buffer", "(3,)", "must have")
    assert_refused(saved, partial(saved.load_checkpoint, folder), *words)

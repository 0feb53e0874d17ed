"""Accelerate over DeepSpeed, with the JSON that turns dmuon on."""

import pytest

from tests.support.hf import (
    CLIP,
    GAS,
    LINEAR,
    LR,
    AcceleratedRun,
    assert_as_one_process,
    assert_equal,
    hf_config,
    hf_ready,
    need,
    pairs,
    resumed_to_the_bit,
    saved,
    seeded_llama,
)
from tests.support.ranks import run_ranks
from tests.support.zero import STAGES, weights

need("deepspeed", "transformers", "accelerate")

by_stage = pytest.mark.parametrize("stage", STAGES)


@by_stage
def test_accelerate(stage, tmp_path):
    run_ranks(check_accelerate, 2, stage, str(tmp_path), limit_s=90)


def check_accelerate(rank, world_size, stage, folder):
    """The loop of its documentation: DummyOptim, DummyScheduler, accumulate, clip, save and load."""
    run = ZeroRun(stage)
    norms = run.train(2)
    assert_as_one_process(run.model, seeded_llama, LINEAR[:2], norms, even=True)
    other, end = resumed_to_the_bit(run, lambda: ZeroRun(stage), weights, folder)
    check_accelerates_saves(other, end, folder)


def check_accelerates_saves(run, want, folder):
    a, engine = run.accelerator, run.model
    state = a.get_state_dict(engine)
    if a.is_main_process:
        assert_equal(state, want)
    bare = a.unwrap_model(engine)
    assert bare is engine.module
    bare.save_pretrained(
        f"{folder}/bare",
        is_main_process=a.is_main_process,
        save_function=a.save,
        state_dict=state,
    )
    a.save_model(engine, f"{folder}/whole")
    a.wait_for_everyone()
    for name in ("bare", "whole"):
        assert_equal(saved(f"{folder}/{name}"), want)
    if a.is_main_process and engine.zero_optimization_stage() == 3:
        with pytest.raises(RuntimeError, match="lies on rank 1 alone"):
            bare.save_pretrained(f"{folder}/without")


class ZeroRun(AcceleratedRun):
    def __init__(self, stage):
        transformers = hf_ready()
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.state import PartialState
        from accelerate.utils import DummyOptim, DummyScheduler

        PartialState(cpu=True)  # a machine without accelerators
        plugin = DeepSpeedPlugin(hf_ds_config=hf_config(stage, gradient_clipping=CLIP))
        self.accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=GAS)
        model = seeded_llama()
        optimizer = DummyOptim(model.parameters(), lr=LR)
        schedule = transformers.get_linear_schedule_with_warmup
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model,
            optimizer,
            pairs(),
            DummyScheduler(optimizer, lr_scheduler_callable=lambda o: schedule(o, 1, 4)),
        )

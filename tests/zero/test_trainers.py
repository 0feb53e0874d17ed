"""HF Trainer, with PEFT too, over DeepSpeed: its JSON alone turns dmuon on."""

import json
import os

import dmuon
import pytest
import torch
import torch.distributed as dist

from tests.support.hf import (
    LINEAR,
    LR,
    WARMUP_DECAY,
    assert_as_one_process,
    assert_equal,
    check_adapter,
    hf_config,
    hf_ready,
    llama_config,
    logged,
    lora_llama,
    make_trainer,
    need,
    saved,
    seeded_llama,
)
from tests.support.ranks import run_fresh, run_ranks
from tests.support.zero import STAGES, weights

need("deepspeed", "transformers", "accelerate")

by_stage = pytest.mark.parametrize("stage", STAGES)


@by_stage
def test_trainer_trains_as_one_process_does(stage, tmp_path):
    run_ranks(check_trainer, 2, stage, str(tmp_path), limit_s=90)


def check_trainer(rank, world_size, stage, folder):
    """The config by its path, the Trainer's own scheduler, and evaluation after each step."""
    hf_ready()
    path = os.path.join(folder, f"ds_config_{rank}.json")
    with open(path, "w") as file:
        json.dump(hf_config(stage), file)
    trainer = make_trainer(path, folder, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert_as_one_process(trainer.deepspeed, seeded_llama, LINEAR, logged(trainer, "grad_norm"))
    assert logged(trainer, "learning_rate") == pytest.approx([LR * f for f in (*LINEAR[1:], 0)])
    losses = logged(trainer, "eval_loss")
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)


@by_stage
def test_the_scheduler_of_the_config(stage, tmp_path):
    run_ranks(check_config_scheduler, 2, stage, str(tmp_path), limit_s=90)


def check_config_scheduler(rank, world_size, stage, folder):
    """It writes absolute rates, and AdamW follows them from its own."""
    hf_ready()
    keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    params = {**dict.fromkeys(keys, "auto"), "warmup_type": "linear"}
    config = hf_config(stage, scheduler={"type": "WarmupDecayLR", "params": params})
    options = {"max_grad_norm": 0.1, "gradient_checkpointing": True}
    trainer = make_trainer(config, folder, warmup_steps=2, **options)
    trainer.train()
    norms = logged(trainer, "grad_norm")
    assert_as_one_process(trainer.deepspeed, seeded_llama, WARMUP_DECAY, norms, clip=0.1)


@by_stage
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_resuming_from_a_checkpoint_in_the_middle(stage, bf16, tmp_path):
    run_ranks(check_resuming, 2, stage, bf16, str(tmp_path), limit_s=90)


def check_resuming(rank, world_size, stage, bf16, folder):
    """The same as never having stopped, to the bit."""
    hf_ready()
    config = hf_config(stage)
    options = {"save_strategy": "steps", "save_steps": 2, "bf16": bf16}
    trainer = make_trainer(config, folder, **options)
    trainer.train()
    end, norms = weights(trainer.deepspeed), logged(trainer, "grad_norm")
    hf_ready()
    again = make_trainer(config, folder, **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert_equal(weights(again.deepspeed), end)
    assert logged(again, "grad_norm") == norms


@by_stage
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "not gathered"])
def test_save_model_writes_the_dedicated_weights(stage, gather, tmp_path):
    run_ranks(check_save_model, 2, stage, gather, str(tmp_path), limit_s=90)


def check_save_model(rank, world_size, stage, gather, folder):
    """At stage 3 without `stage3_gather_16bit_weights_on_model_save` it is a DeepSpeed checkpoint."""
    hf_ready()
    zero = {"stage3_gather_16bit_weights_on_model_save": gather}
    trainer = make_trainer(hf_config(stage, zero=zero), folder, max_steps=2)
    trainer.train()
    trainer.save_model()
    want = weights(trainer.deepspeed)
    dist.barrier()
    assert_equal(saved(folder) if gather or stage < 3 else from_shards(folder), want)


def from_shards(folder):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    assert not os.path.exists(f"{folder}/model.safetensors")
    return get_fp32_state_dict_from_zero_checkpoint(folder)


@pytest.mark.parametrize("how", ["from_pretrained", "from_config"])
def test_a_model_that_transformers_builds_in_partitions(how, tmp_path):
    run_ranks(check_zero_init, 2, how, str(tmp_path), limit_s=90)


def check_zero_init(rank, world_size, how, folder):
    """Under the config of stage 3 `from_pretrained` and `from_config` build inside `zero.Init`."""
    transformers = hf_ready()
    if rank == 0:
        seeded_llama().save_pretrained(folder)
    dist.barrier()
    start = {}

    def build():
        auto = transformers.AutoModelForCausalLM
        model = (
            auto.from_pretrained(folder)
            if how == "from_pretrained"
            else auto.from_config(llama_config())
        )
        for name, p in model.named_parameters():
            assert hasattr(p, "ds_id")
            start[name] = dmuon.zero.seams.whole(p)
        return model

    trainer = make_trainer(hf_config(3), folder, model=build)
    trainer.train()
    norms = logged(trainer, "grad_norm")
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    assert_as_one_process(trainer.deepspeed, lambda: loaded(start), LINEAR, norms)
    assert how == "from_config" or torch.equal(
        start["lm_head.weight"], seeded_llama().lm_head.weight
    )


def loaded(state):
    model = seeded_llama()
    model.load_state_dict(state)
    return model


def test_evaluation_alone_at_stage_3(tmp_path):
    run_ranks(check_evaluation_alone, 2, str(tmp_path), limit_s=90)


def check_evaluation_alone(rank, world_size, folder):
    """Trainer takes the optimizer out of the config for it."""
    hf_ready()
    with pytest.warns(UserWarning, match="this engine evaluates, it cannot train"):
        loss = make_trainer(hf_config(3), folder).evaluate()["eval_loss"]
    hf_ready()
    assert loss == pytest.approx(make_trainer(None, folder).evaluate()["eval_loss"], rel=1e-6)


def test_configs_that_would_leave_matrices_untrained(tmp_path):
    run_ranks(check_incomplete_configs, 2, str(tmp_path), limit_s=90)


def check_incomplete_configs(rank, world_size, folder):
    """Each fails as soon as training begins, and says what to write."""
    whole = hf_config(2)
    without = {key: {k: v for k, v in whole.items() if k != key} for key in ("dmuon", "optimizer")}
    other = hf_config(2, optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    template = hf_config(2)
    template["optimizer"]["params"] |= {"betas": "auto", "eps": "auto"}
    for config, says in (
        (without["dmuon"], r'For this model: "dmuon": {"include": \["\*.down_proj"'),
        (without["optimizer"], r'got the optimizer AdamW.*name "DMuon" in the config'),
        (other, r'the optimizer of this config is .AdamW.*"type": "DMuon"'),
        (template, r"optimizer.params has 'betas'.*'adamw_betas'"),
    ):
        hf_ready()
        with pytest.raises(ValueError, match=says):
            make_trainer(config, folder).train()


def test_another_trainer_over_a_model_that_is_trained(tmp_path):
    run_ranks(check_another_trainer, 2, str(tmp_path), limit_s=90)


def check_another_trainer(rank, world_size, folder):
    hf_ready()
    trainer = make_trainer(hf_config(1), folder, max_steps=1)
    trainer.train()
    with pytest.raises(ValueError, match="Build the model again"):
        make_trainer(hf_config(1), folder, trainer.model).train()


def test_deepspeed_initialize_bound_before_dmuon():
    """The script does not get DeepSpeed's AdamW."""
    (printed,) = run_fresh(BOUND_EARLY, 1)
    assert "bound before `import dmuon`" in printed
    assert "Call dmuon.zero.initialize(model=..., config=...)" in printed


BOUND_EARLY = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed import initialize
from tests.support.models import Net
from tests.support.zero import deepspeed_ready, ds_config
deepspeed_ready()
try:
    initialize(model=Net(), config=ds_config(1))
except RuntimeError as error:
    print(error)
"""


@by_stage
def test_lora_by_peft(stage, tmp_path):
    need("peft")
    run_ranks(check_lora, 2, stage, str(tmp_path), limit_s=90)


def check_lora(rank, world_size, stage, folder):
    """Its matrices are dedicated, the model below is frozen, the whole head is DeepSpeed's."""
    hf_ready()
    config = hf_config(stage, include=["*.lora_A.*", "*.lora_B.*"])
    options = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(config, folder, lora_llama, **options)
    trainer.train()
    end = weights(trainer.deepspeed)
    assert_as_one_process(trainer.deepspeed, lora_llama, LINEAR, logged(trainer, "grad_norm"))
    for name, p in lora_llama().named_parameters():
        assert p.requires_grad != torch.equal(end[name], p), name
    trainer.save_model()
    dist.barrier()
    check_adapter(folder, end)
    hf_ready()
    again = make_trainer(config, folder, lora_llama, **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert_equal(weights(again.deepspeed), end)

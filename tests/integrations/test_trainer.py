"""HF Trainer over a model that was sharded by hand: the same as one process, to the bit after resuming."""

import errno
import glob
import os

import dmuon
import pytest
import torch
import torch.distributed as dist

from tests.support.hf import (
    CLIP,
    LINEAR,
    LR,
    STEPS,
    assert_as_one_process,
    assert_equal,
    check_adapter,
    hand_wrapped,
    llama_config,
    logged,
    lora_llama,
    make_trainer,
    need,
    projections,
    rows,
    saved,
    seeded_llama,
    trainer_ready,
)
from tests.support.parity import assert_all_raise, cpu_mesh
from tests.support.ranks import run_ranks
from tests.support.weights import full_weights

need("transformers", "accelerate")


def hand_made(folder, model=None, **changes):
    """Trainer as in the listing of the README."""
    trainer_ready()
    model = hand_wrapped() if model is None else model
    optimizers = {"optimizers": (dmuon.Muon(model, lr=LR), None)}
    return make_trainer(None, folder, model, trainer=optimizers, **changes)


def by_name(folder, **changes):
    trainer_ready()
    named = {"optimizer_cls_and_kwargs": (lambda: dmuon.Muon, {"lr": LR})}
    return make_trainer(None, folder, hand_wrapped(), trainer=named, **changes)


@pytest.mark.parametrize("make", [hand_made, by_name])
@pytest.mark.parametrize("clip", [0.5, 0.0])
def test_it_trains_as_one_process_does(make, clip, tmp_path):
    run_ranks(check_training, 2, make, clip, str(tmp_path), limit_s=90)


def check_training(rank, world_size, make, clip, folder):
    """Accumulation, the norm that is logged, Trainer's own scheduler, evaluation after each step."""
    trainer = make(folder, max_grad_norm=clip, eval_strategy="steps", eval_steps=1)
    trainer.train()
    norms = logged(trainer, "grad_norm")
    options = {"read": full_weights, "clip": clip or float("inf")}
    assert_as_one_process(trainer.model, seeded_llama, LINEAR, norms, **options)
    assert logged(trainer, "learning_rate") == pytest.approx([LR * f for f in LINEAR])
    losses = logged(trainer, "eval_loss")
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)


def test_bfloat16_is_a_loop_of_ones_own_under_autocast(tmp_path):
    run_ranks(check_bfloat16, 2, str(tmp_path), limit_s=90)


def check_bfloat16(rank, world_size, folder):
    """To the bit, the norms too. Products are bfloat16; weights, gradients and masters float32."""
    options = {"bf16": True, "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
    trainer, other = (hand_made(folder, **options) for _ in range(2))
    trainer.train_dataset = other.train_dataset = rows(even=True)
    dtypes, norms = set(), []
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    trainer.train()
    assert dtypes == {torch.bfloat16}
    model, optimizer, loader = other.model, other.optimizer, iter(other.get_train_dataloader())
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**next(loader)).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert {g.dtype for g in gradients} == {torch.float32}
        norms.append(dmuon.clip_grad_norm_(optimizer, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(full_weights(trainer.model), full_weights(model))
    assert logged(trainer, "grad_norm") == norms


SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resuming_from_a_checkpoint_in_the_middle(dtype, tmp_path):
    run_ranks(check_resuming, 2, dtype, str(tmp_path), limit_s=90)


def check_resuming(rank, world_size, dtype, folder):
    """The same as never having stopped, to the bit; what is written, `from_pretrained` reads."""

    def make():
        model = hand_wrapped(seeded_llama().to(dtype))
        return hand_made(folder, model, lr_scheduler_type="cosine", **SAVING)

    trainer = make()
    trainer.train()
    end, losses = full_weights(trainer.model), logged(trainer, "eval_loss")
    check_pretrained(f"{folder}/checkpoint-4", trainer.model)
    again = make()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert_equal(full_weights(again.model), end)
    assert logged(again, "grad_norm") == logged(trainer, "grad_norm")
    assert logged(again, "eval_loss") == losses


def check_pretrained(folder, model):
    """The weights as they are, in the dtype of the model; tied names are left out."""
    from transformers import AutoModelForCausalLM

    dist.barrier()
    dtype = next(model.parameters()).dtype
    read = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_parameters())
    held = {name: w.to(dtype) for name, w in full_weights(model).items()}
    assert_equal(read, held)
    assert {t.dtype for t in saved(folder).values()} == {dtype}


def test_the_best_model_at_the_end(tmp_path):
    run_ranks(check_best, 2, str(tmp_path), limit_s=90)


def check_best(rank, world_size, folder):
    """Here the first one: a loss that may only rise."""
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = hand_made(folder, greater_is_better=True, **SAVING, **options)
    trainer.train()
    assert trainer.state.best_model_checkpoint == f"{folder}/checkpoint-2"
    check_pretrained(trainer.state.best_model_checkpoint, trainer.model)


def test_tied_weights_in_several_files(tmp_path):
    run_ranks(check_shards, 2, str(tmp_path), limit_s=90)


def check_shards(rank, world_size, folder):
    """`max_shard_size` is `save_pretrained`'s; Trainer resumes from its files too."""
    trainer = hand_made(folder, hand_wrapped(tied_llama()), max_steps=1, save_strategy="steps")
    trainer.train()
    want, checkpoint = full_weights(trainer.model), f"{folder}/checkpoint-1"
    whole = dmuon.get_model_state_dict(trainer.model)
    if rank == 0:
        os.remove(f"{checkpoint}/model.safetensors")
        trainer.model.save_pretrained(checkpoint, state_dict=whole, max_shard_size="4KB")
        assert len(glob.glob(f"{checkpoint}/model-*.safetensors")) > 2
    dist.barrier()
    again = hand_made(folder, hand_wrapped(tied_llama()), max_steps=1)
    again.train(resume_from_checkpoint=checkpoint)
    assert_equal(full_weights(again.model), want)


def tied_llama():
    from transformers import LlamaForCausalLM

    torch.manual_seed(8)
    config = llama_config()
    config.tie_word_embeddings = True
    return LlamaForCausalLM(config)


def test_a_checkpoint_of_the_weights_alone(tmp_path):
    run_ranks(check_weights_alone, 2, str(tmp_path), limit_s=90)


def check_weights_alone(rank, world_size, folder):
    trainer = hand_made(folder, max_steps=2, save_only_model=True, **SAVING)
    trainer.train()
    again = hand_made(folder, max_steps=2)
    with pytest.warns(UserWarning, match="optimizer.pt .*starts anew"):
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert_equal(full_weights(again.model), full_weights(trainer.model))


def test_a_disk_that_is_full(tmp_path):
    run_ranks(check_full_disk, 2, str(tmp_path), limit_s=90)


def check_full_disk(rank, world_size, folder):
    """What the first rank meets while it writes, all ranks raise; training can go on."""
    trainer = hand_made(folder, max_steps=1)
    trainer.train()
    if rank == 0:
        trainer.model.save_pretrained = full_disk
    assert_all_raise(trainer.save_model, "ValueError", "No space left on device")
    assert_all_raise(lambda: trainer.save_model("/proc/no"), "ValueError", "/proc/no")


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_evaluating_before_there_is_an_optimizer(tmp_path):
    run_ranks(check_evaluation_first, 2, str(tmp_path), limit_s=90)


def check_evaluation_first(rank, world_size, folder):
    """It leaves the root's parameters whole; the optimizer must get the sharded ones."""
    trainer, other = by_name(f"{folder}/0"), by_name(f"{folder}/1")
    trainer.evaluate()
    for each in (trainer, other):
        each.train()
    assert_equal(full_weights(trainer.model), full_weights(other.model))


def test_ddp(tmp_path):
    run_ranks(check_ddp, 2, str(tmp_path), limit_s=90)


def check_ddp(rank, world_size, folder):
    """Accelerate adds no wrapper of its own to what `dmuon.replicate` keeps equal."""
    trainer = replicated(folder, **SAVING)
    trainer.train()
    norms, end = logged(trainer, "grad_norm"), full_weights(trainer.model)
    assert_as_one_process(trainer.model, seeded_llama, LINEAR, norms, read=full_weights)
    check_pretrained(f"{folder}/checkpoint-4", trainer.model)
    again = replicated(folder, **SAVING)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert_equal(full_weights(again.model), end)


def replicated(folder, **changes):
    model, mesh = seeded_llama(), cpu_mesh(dist.get_world_size())
    dmuon.dedicate_params_ddp(model, mesh, projections)
    dmuon.replicate(model, mesh)
    return hand_made(folder, model, **changes)


def test_lora_by_peft(tmp_path):
    need("peft")
    run_ranks(check_lora, 2, str(tmp_path), limit_s=90)


def check_lora(rank, world_size, folder):
    """The model below is frozen; what is saved is the adapter."""
    model = hand_wrapped(lora_llama(), lambda name, p: ".lora_" in name)
    trainer = hand_made(folder, model, save_strategy="steps")
    trainer.train()
    end, norms = full_weights(trainer.model), logged(trainer, "grad_norm")
    assert_as_one_process(trainer.model, lora_llama, LINEAR, norms, read=full_weights)
    for name, p in lora_llama().named_parameters():
        assert p.requires_grad != torch.equal(end[name], p), name
    dist.barrier()
    check_adapter(f"{folder}/checkpoint-4", end)
    call = lambda: trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")  # noqa: E731
    assert_all_raise(call, "ValueError", "adapter", "load it into the model before dedicate_params")


def test_resuming_on_another_number_of_ranks(tmp_path):
    want = run_ranks(write_checkpoint, 2, str(tmp_path), limit_s=90)[0]
    for got in run_ranks(read_checkpoint, 3, str(tmp_path), limit_s=90):
        assert got == want


def write_checkpoint(rank, world_size, folder):
    trainer = hand_made(folder, max_steps=2, save_strategy="steps")
    trainer.train()
    return all_of(trainer)


def read_checkpoint(rank, world_size, folder):
    """What there is before the next step; then it goes on."""
    trainer = hand_made(folder, max_steps=3)
    found = []
    trainer.add_callback(before_training(lambda: found.append(all_of(trainer))))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert len(logged(trainer, "grad_norm")) == 3
    return found[0]


def before_training(look):
    from transformers import TrainerCallback

    class Before(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            look()

    return Before()


def all_of(trainer):
    """Weights and optimizer, as plain data that goes through a pipe."""
    whole = {"rank0_only": False}
    optimizer = trainer.optimizer.optimizer
    state = dmuon.get_optimizer_state_dict(trainer.model, optimizer, **whole)
    tensors = dict(dmuon.get_model_state_dict(trainer.model, **whole))
    tensors |= {f"{n}.{key}": t for n, entry in state["state"].items() for key, t in entry.items()}
    return {name: t.tolist() for name, t in tensors.items()}, state["param_groups"]

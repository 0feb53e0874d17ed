"""Accelerate: models sharded by hand, and by its FSDP2 plugin, which on a CPU has to be forced."""

import glob

import dmuon
import pytest
import torch
import torch.distributed as dist
from dmuon.integrations import accelerate as integration
from torch.distributed.fsdp import FSDPModule

from tests.support.hf import (
    GAS,
    LINEAR,
    LR,
    AcceleratedRun,
    assert_as_one_process,
    assert_equal,
    hand_wrapped,
    need,
    pairs,
    projections,
    resumed_to_the_bit,
    saved,
    seeded_llama,
    trainer_ready,
)
from tests.support.parity import assert_all_raise, cpu_mesh
from tests.support.ranks import run_ranks
from tests.support.weights import full_weights

need("transformers", "accelerate")


class Run(AcceleratedRun):
    def __init__(self, put, **options):
        transformers = trainer_ready()
        self.accelerator, self.model, self.optimizer = put(**options)
        # Accelerate's scheduler makes a step for each rank.
        ranks, schedule = dist.get_world_size(), transformers.get_linear_schedule_with_warmup
        self.loader, self.scheduler = self.accelerator.prepare(
            pairs(), schedule(self.optimizer, ranks, 4 * ranks)
        )


def by_hand(**options):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GAS, **options)
    model = hand_wrapped()
    return accelerator, *accelerator.prepare(model, dmuon.Muon(model, lr=LR))


def by_plugin(make=seeded_llama, plugin=None, **options):
    accelerator = with_fsdp2(plugin, **options)
    return accelerator, *integration.prepare(accelerator, make(), projections, lr=LR)


def with_fsdp2(plugin=None, **options):
    """Accelerate takes the plugin on accelerators only; from here on it believes that it has some."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState

    wrap = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    plugin = FullyShardedDataParallelPlugin(**{**wrap, **(plugin or {})})
    options = {"gradient_accumulation_steps": GAS, **options}
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    assert accelerator.is_fsdp2
    return accelerator


def by_plugin_from_rank_0(**options):
    """As `from_pretrained` leaves it under this option: values on the first rank alone."""
    return by_plugin(only_on_rank_0, {"cpu_ram_efficient_loading": True}, **options)


def only_on_rank_0():
    model = seeded_llama()
    if dist.get_rank() != 0:
        for p in model.parameters():
            p.data.fill_(torch.nan)
    return model


def by_plugin_with_checkpointing(**options):
    return by_plugin(plugin={"activation_checkpointing": True}, **options)


@pytest.mark.parametrize(
    "put", [by_hand, by_plugin, by_plugin_from_rank_0, by_plugin_with_checkpointing]
)
def test_accelerate(put, tmp_path):
    run_ranks(check_accelerate, 2, put, str(tmp_path), limit_s=90)


def check_accelerate(rank, world_size, put, folder):
    """Accumulate, clip, save and load; loading twice, and in a run that begins, to the bit."""
    run = Run(put)
    assert all(isinstance(m, FSDPModule) for m in (run.model, *run.model.model.layers))
    norms = run.train(2)
    assert_as_one_process(run.model, seeded_llama, LINEAR[:2], norms, even=True, read=full_weights)
    run.accelerator.save_state(folder)  # and over it
    other, end = resumed_to_the_bit(run, lambda: Run(put), full_weights, folder)
    check_saves(other, end, folder)


def check_saves(run, want, folder):
    a = run.accelerator
    state, bare = a.get_state_dict(run.model), a.unwrap_model(run.model)
    if a.is_main_process:
        assert_equal(state, want)
    says = "without state_dict=", "dmuon.get_model_state_dict(model)"
    assert_all_raise(lambda: bare.save_pretrained(f"{folder}/bare"), "ValueError", *says)
    options = {"is_main_process": a.is_main_process, "state_dict": state}
    bare.save_pretrained(f"{folder}/bare", save_function=a.save, **options)
    a.save_model(run.model, f"{folder}/whole")
    a.save_model(run.model, f"{folder}/shards", max_shard_size="4KB")
    a.wait_for_everyone()
    assert len(glob.glob(f"{folder}/shards/*.safetensors")) > 2
    for name in ("bare", "whole"):
        assert_equal(saved(f"{folder}/{name}"), want)
    assert_equal(dict(seeded_from(f"{folder}/shards").named_parameters()), want)


def seeded_from(folder):
    from accelerate import load_checkpoint_in_model

    model = seeded_llama()
    load_checkpoint_in_model(model, folder)
    return model


@pytest.mark.parametrize("put", [by_hand, by_plugin, by_plugin_from_rank_0])
def test_bfloat16(put):
    run_ranks(check_bfloat16, 2, put, limit_s=90)


def check_bfloat16(rank, world_size, put):
    """Autocast, or the plugin's MixedPrecisionPolicy; masters stay float32, and a norm within what bfloat16
    loses."""
    exact = [norm.item() for norm in Run(put).train(2)]
    run = Run(lambda: put(mixed_precision="bf16"))
    seen = []
    layer = run.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    norms = [norm.item() for norm in run.train(2)]
    assert norms == pytest.approx(exact, rel=8 * torch.finfo(torch.bfloat16).eps)
    assert norms != exact and set(seen) == {torch.bfloat16}
    assert {w.dtype for w in full_weights(run.model).values()} == {torch.float32}


def test_what_cannot_be_prepared():
    run_ranks(check_refusals, 2, limit_s=90)


def check_refusals(rank, world_size):
    """Before anything has changed, on all ranks, and with what to do."""
    trainer_ready()
    from accelerate import Accelerator

    def prepare(accelerator, model):
        return lambda: integration.prepare(accelerator, model, projections)

    plain = Accelerator(cpu=True)
    model = seeded_llama()
    assert_all_raise(prepare(plain, model), "ValueError", "not FSDP2", "fsdp_version=2")
    half = seeded_llama()
    dmuon.dedicate_params(half, cpu_mesh(world_size), projections)
    assert_all_raise(lambda: plain.prepare(half), "ValueError", "Call fully_shard")
    optimizer = torch.optim.SGD(half.parameters())
    says = "this SGD has the dedicated parameters 'model.layers.0", "Use dmuon.Muon(model)"
    assert_all_raise(lambda: plain.prepare(optimizer), "ValueError", *says)
    trainer_ready()
    accelerator = with_fsdp2({"cpu_ram_efficient_loading": True})
    for ours in (half, hand_wrapped()):
        assert_all_raise(prepare(accelerator, ours), "ValueError", "already")
        call = lambda ours=ours: accelerator.prepare(ours, torch.optim.SGD(ours.parameters()))  # noqa: E731
        assert_all_raise(call, "ValueError", "integrations.accelerate.prepare")
    nothing = lambda: integration.prepare(accelerator, model, lambda name, p: False)  # noqa: E731
    assert_all_raise(nothing, "ValueError", "selects no parameter")
    assert not any(p.is_meta for p in model.parameters())
    for keywords, says in WRONG_KEYWORDS:
        call = lambda given=keywords: integration.prepare(accelerator, model, projections, **given)  # noqa: E731
        assert_all_raise(call, "ValueError", says)
        assert_equal(dict(model.named_parameters()), dict(seeded_llama().named_parameters()))
    integration.prepare(accelerator, model, projections)


WRONG_KEYWORDS = (
    ({"learning_rate": 1}, "prepare has 'learning_rate', which is unknown; known: lr,"),
    (
        {"dedicate": {"compute_dtyp": 1}},
        "dedicate has 'compute_dtyp', which is unknown; did you mean",
    ),
    ({"lr": -1.0}, "lr of 'default/muon' is -1.0"),
    ({"adamw_betas": (0.9,)}, "betas of 'default/adamw' are (0.9,)"),
    ({"ns_steps": 0}, "ns_steps is 0"),
    ({"nonfinite": "rise"}, "nonfinite is 'rise'"),
    ({"tp_distributed_gram_policy": "often"}, "tp_distributed_gram_policy is 'often'"),
    ({"param_groups": []}, "prepare got param_groups"),
)


def test_what_the_plugin_cannot_have():
    run_ranks(check_plugins, 2, limit_s=90)


def check_plugins(rank, world_size):
    trainer_ready()
    from accelerate import Accelerator

    def refused(accelerator, *words):
        call = lambda: integration.prepare(accelerator, seeded_llama(), projections)  # noqa: E731
        assert_all_raise(call, "ValueError", *words)

    refused(with_fsdp2({"cpu_offload": True}), "cpu_offload")
    trainer_ready()
    by_size = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}
    refused(with_fsdp2(by_size), "the LlamaModel 'model'", "transformer_based_wrap")
    trainer_ready()
    accelerator = with_fsdp2()
    accelerator.state._mixed_precision = "fp16"  # which it refuses itself on a CPU
    refused(accelerator, "fp16", "'bf16'")
    trainer_ready()
    accelerator = with_fsdp2()
    accelerator.state.parallelism_config = object()
    refused(accelerator, "parallelism_config", "yourself")
    trainer_ready()
    plain, model = Accelerator(cpu=True), hand_wrapped()
    plain.state._mixed_precision = "fp16"
    call = lambda: plain.prepare(model, dmuon.Muon(model))  # noqa: E731
    assert_all_raise(call, "ValueError", "fp16", "'bf16'")

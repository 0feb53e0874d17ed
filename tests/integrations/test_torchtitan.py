"""torchtitan's Trainer with dmuon: its llama3 debug model, its schedules, clipping and checkpoints, on gloo."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.titan import (
    ROWS,
    STEPS,
    Trained,
    assert_as_one_process,
    config,
    run_titan,
    titan,
)
from tests.support.weights import assert_same, full_weights

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

HSDP = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}
TP = {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"}
WO, W1 = "layers.1.attention.wo.weight", "layers.1.feed_forward.w1.weight"
NEVER = {"fsdp_reshard_after_forward": "never", "spmd_backend": "partial_dtensor"}


@pytest.mark.parametrize(
    "world_size, parallelism, accumulate",
    [(2, {}, 1), (2, NEVER, 2), (4, HSDP, 1), (4, TP, 2)],
    ids=["fsdp2", "fsdp2 accumulating", "hsdp", "fsdp2+tp accumulating"],
)
def test_trains_as_one_process_does(world_size, parallelism, accumulate):
    run_titan(check_training, world_size, parallelism, accumulate)


def check_training(rank, world_size, parallelism, accumulate):
    """Its gradients are sums, over ranks and micro-batches, of a loss divided by the tokens of all."""
    ranks = world_size // parallelism.get("tensor_parallel_degree", 1)
    training = {"global_batch_size": ranks * ROWS * accumulate}
    trained = Trained(config(parallelism=parallelism, training=training)).train()
    assert_as_one_process(trained, ranks=ranks, accumulate=accumulate)


# torchtitan's checkpointer -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size, parallelism, mode",
    [(2, {}, "disabled"), (2, {}, "async"), (4, HSDP, "disabled"), (4, TP, "disabled")],
    ids=["fsdp2", "fsdp2 async", "hsdp", "fsdp2+tp"],
)
def test_a_resumed_run_is_the_same_to_the_bit(world_size, parallelism, mode, tmp_path):
    run_titan(check_resuming, world_size, parallelism, mode, str(tmp_path))


def check_resuming(rank, world_size, parallelism, mode, folder):
    """Also where the Trainer that resumes has other weights to begin with."""
    whole = Trained(saving(folder, mode, parallelism)).train()
    again = Trained(saving(folder, mode, parallelism, load_step=2, debug={"seed": 5}))
    assert not torch.equal(again.start[WO], whole.start[WO])
    again.train()
    assert_same(again.end, whole.end)
    for key in ("step", "loss", "norm", "lr/Muon/0", "lr/Muon/1", "n_tokens_seen"):
        assert again.column(key) == whole.column(key)[2:], key
    if rank == 0:
        check_keys(folder)


def check_keys(folder):
    """By torchtitan's names: the fused projection cut in three, and no wrapper's prefix."""
    keys = set(
        dcp.FileSystemReader(f"{folder}/checkpoint/step-2").read_metadata().state_dict_metadata
    )
    assert {f"layers.1.attention.qkv_linear.w{x}.weight" for x in "qkv"} | {WO} <= keys
    assert f"optimizer.state.{WO}.momentum_buffer" in keys
    assert "optimizer.state.layers.1.attention.qkv_linear.wqkv.weight.momentum_buffer" in keys
    assert {
        f"optimizer.state.norm.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    } <= keys
    assert f"optimizer.param_groups.{WO}.lr" in keys
    assert not any("_checkpoint_wrapped_module" in key for key in keys)


def saving(folder, mode, parallelism, *, debug=None, **checkpoint):
    titan()
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.config.configs import DebugConfig

    options = {"enable": True, "interval": 2, "last_save_model_only": False, "async_mode": mode}
    return config(
        folder,
        parallelism=parallelism,
        checkpoint=CheckpointManager.Config(**options | checkpoint),
        debug=DebugConfig(**debug or {}),
    )


def test_the_first_checkpoint_may_come_before_the_first_step(tmp_path):
    run_titan(check_before_a_step, 2, str(tmp_path))


def check_before_a_step(rank, world_size, folder):
    """torchtitan would fill an empty state by a step with gradients of zero; ours is full."""
    first = Trained(saving(folder, "disabled", {}))
    first.trainer.checkpointer.save(0, last_step=True)
    assert_same(full_weights(first.model), first.start)
    again = Trained(saving(folder, "disabled", {}, debug={"seed": 5}))
    again.trainer.checkpointer.load(step=0)
    assert_same(full_weights(again.model), first.start)
    assert first.ns_calls == again.ns_calls == 0


def test_safetensors_for_hugging_face(tmp_path):
    run_titan(check_hugging_face, 2, str(tmp_path))


def check_hugging_face(rank, world_size, folder):
    """The last save in bfloat16 under Hugging Face's names, read again by another Trainer and by safetensors."""
    last = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    from safetensors.torch import load_file

    trained = Trained(saving(folder, "disabled", {}, **last)).train()
    dist.barrier()
    path = f"{folder}/checkpoint/step-{STEPS}"
    files = [load_file(str(f)) for f in Path(path).glob("*.safetensors")]
    tensors = {name: t for file in files for name, t in file.items()}
    for mine, theirs in ((WO, "self_attn.o_proj"), (W1, "mlp.gate_proj")):
        want = trained.end[mine].bfloat16()
        assert torch.equal(tensors[f"model.layers.1.{theirs}.weight"], want)
    start = {"initial_load_path": path, "initial_load_in_hf": True, "load_only": True}
    again = Trained(saving(f"{folder}/again", "disabled", {}, **start))
    again.trainer.checkpointer.load()
    assert_same(
        full_weights(again.model), {n: w.bfloat16().float() for n, w in trained.end.items()}
    )

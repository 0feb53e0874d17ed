"""What the figures under DeepSpeed ZeRO share: engines, on two ranks, from configs that differ in the
optimizer alone, and the training of the parity figures with them."""

import os
import sys
from pathlib import Path

import dmuon
import parity
import torch
import torch.distributed as dist
from parity import Parameters
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))

WORLD_SIZE = 2
STAGES = (0, 1, 2, 3)
OURS, ADAMW, THEIRS = "dmuon", "AdamW", "DeepSpeed's Muon"


def ready():
    """DeepSpeed on a rank whose process group is there. Before anything else of this file."""
    from deepspeed_here import import_deepspeed

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo", dist_init_required=False)
    return deepspeed


def config(side: str, stage: int, clip: float = 0.0) -> dict:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if side == THEIRS and stage == 3:
        zero["reduce_scatter"] = False  # or it refuses
    return {
        "train_micro_batch_size_per_gpu": 1,  # only counted
        "gradient_clipping": clip,
        "zero_optimization": zero,
        **OPTIMIZERS[side],
    }


def _adam(prefix: str = "") -> dict:
    return {prefix + key: value for key, value in parity.ADAMW.items()}


_MUON = {"lr": parity.LR, "momentum": parity.MOMENTUM}
OPTIMIZERS = {
    OURS: {
        "optimizer": {
            "type": "DMuon",
            "params": _MUON | {"weight_decay": parity.DECAY} | _adam("adamw_"),
        },
        "dmuon": {"include": ["units.*"]},
    },
    ADAMW: {"optimizer": {"type": "AdamW", "params": _adam() | {"torch_adam": True}}},
    # One weight decay serves both halves.
    THEIRS: {
        "optimizer": {
            "type": "Muon",
            "params": _adam() | _MUON | {"adam_lr": parity.ADAMW["lr"], "torch_adam": True},
        }
    },
}


def engine_of(model: nn.Module, config: dict):
    import deepspeed

    return deepspeed.initialize(model=model, config=config)[0]


def train_step(engine, *batch: Tensor) -> Tensor:
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def train(config: dict) -> parity.Trained:
    """The model of the parity figures, at the numbers of steps that have a limit."""
    engine = engine_of(parity.initial_model(), config)
    trained = {}
    for step in range(1, max(parity.LIMITS) + 1):
        train_step(engine, *batch(step))
        if step in parity.LIMITS:
            trained[step] = whole_weights(engine)
    engine.destroy()
    return trained


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the four slices that one process sums."""
    count = parity.WORLD_SIZE // dist.get_world_size()
    first = dist.get_rank() * count
    parts = [parity.slice_of_batch(step, s) for s in range(first, first + count)]
    return tuple(torch.cat(part) for part in zip(*parts))


def whole_weights(engine) -> Parameters:
    """Collective; the same on every rank."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = (
        dmuon.zero.named_parameters(engine) if is_ours(engine) else engine.module.named_parameters()
    )
    return {
        name: (p if (whole := safe_get_full_fp32_param(p)) is None else whole).detach().clone()
        for name, p in named
    }


def is_ours(engine) -> bool:
    return "dmuon" in engine.config

"""What the tests of ZeRO's checkpoints share."""

import os

import dmuon
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from tests.support.zero import ds_config, make_engine, train

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}}


def config_of(stage, **changes):
    """Everything that a checkpoint must bring back plays a part."""
    return ds_config(stage, **{"clip": 0.1, "gas": 2, "scheduler": WARMUP, **changes})


def trained(config, steps=2, seed=7):
    engine = make_engine(config, seed=seed)
    train(engine, steps)
    return engine


def momenta(engine):
    """By name, whole, on every rank."""
    return {
        p.param_name: safe_get_full_optimizer_state(p.parameter, "momentum_buffer")
        for p in dmuon.get_dedicated_params(engine)
    }


def tag_folder(folder, steps=2):
    return os.path.join(folder, f"global_step{steps}")


def read(path):
    return torch.load(path, map_location="cpu", weights_only=False)

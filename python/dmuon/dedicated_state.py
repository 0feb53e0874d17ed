"""Optimizer state of dedicated parameters: which there is, of which shape, and what of it lies on this rank."""

import torch
from torch.distributed.tensor import DTensor

from dmuon.checkpoint import OwnedTensor, as_parameter, owned_tensor
from dmuon.states import MASTER
from dmuon.tensor_parallel import local_part


def state_shapes(param) -> dict[str, tuple]:
    shape = tuple(param.full_shape)
    if param.route == "adamw":
        return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
    return {"momentum_buffer": shape}


def shown_master(param) -> torch.Tensor:
    mine = param.runtime.engine.master(param.index)
    if mine is None:
        return owned_tensor(param, f"{param.param_name}.{MASTER}", torch.float32)
    return as_parameter(param, mine)


def as_whole(param, key: str, mine: torch.Tensor) -> torch.Tensor:
    return as_parameter(param, mine) if in_shards(param, key) else mine


def check_state(param, values: dict, is_here: bool) -> None:
    wanted = state_shapes(param)
    if MASTER in values:
        wanted[MASTER] = tuple(param.full_shape)
    for key, shape in wanted.items():
        value = values.get(key)
        if value is None or tuple(value.shape) != shape:
            given = "missing" if value is None else f"of shape {tuple(value.shape)}"
            raise ValueError(f"{key} of {param.param_name!r} is {given}; it must have {shape}.")
        if is_here and isinstance(value, OwnedTensor):
            raise ValueError(f"{value!r} was saved on a rank that did not own it.")


def my_part(param, key: str, value: torch.Tensor) -> torch.Tensor:
    """Of optimizer state: what lies here of it."""
    if isinstance(value, DTensor):
        return local_part(value)
    if in_shards(param, key):
        return param.layout.local_of(value, param.runtime.tp_rank)
    return value


def in_shards(param, key: str) -> bool:
    """AdamW's state of a weight that is cut lies as the weight does; momentum whole, on the TP owner,
    unless gradients stay in shards."""
    elementwise = param.route == "adamw" or param.in_shards
    return param.shard_dim is not None and elementwise and key != "step"

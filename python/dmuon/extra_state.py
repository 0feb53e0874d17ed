"""What modules keep beside parameters and buffers: ``get_extra_state`` and ``set_extra_state`` of torch."""

import copy

import torch
from torch import nn

from dmuon.names import clean

_KEY = "_extra_state"  # as torch names its entry of a state dict


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Key in ``state_dict`` -> the module that has it."""
    return {
        clean(f"{name}.{_KEY}" if name else _KEY): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def is_extra(key: str) -> bool:
    """Of a key of a state dict."""
    return key.rpartition(".")[2] == _KEY


def snapshot_of(value):
    """A copy: the module goes on with the original."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

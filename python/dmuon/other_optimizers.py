"""Optimizers that are not dmuon's, over parameters whose weights only their owners have."""

import torch

from dmuon.errors import listed
from dmuon.optimizer import Muon
from dmuon.runtime import runtimes


def check_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """For ``torch.optim.optimizer.register_optimizer_step_pre_hook``."""
    if not torch.compiler.is_compiling() and runtimes():
        check_optimizer(optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where a step of ``optimizer`` would write into dedicated parameters. Local."""
    if isinstance(optimizer, Muon) or _steps_others(optimizer):
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(p, "_dedicated_owner_rank") for p in held):
        names = {id(p.parameter): p.param_name for r in runtimes() for p in r.params}
        raise ValueError(
            f"this {type(optimizer).__name__} has the dedicated parameters "
            f"{listed([names[id(p)] for p in held if id(p) in names], 3)}, whose gradients their owners alone have: the "
            "ranks would part. Use dmuon.Muon(model), which trains the other parameters with AdamW; or give it only "
            "those that are not dedicated."
        )


def _steps_others(optimizer: torch.optim.Optimizer) -> bool:
    """A container, or a wrapper: each of what it holds is checked in a step of its own."""
    for value in vars(optimizer).values():
        held = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, torch.optim.Optimizer) for one in held):
            return True
    return False

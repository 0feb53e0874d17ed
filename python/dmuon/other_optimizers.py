"""Optimizers that are not dmuon's, over parameters whose weights only their owners have."""

from collections.abc import Iterator

import torch

from dmuon.errors import listed
from dmuon.optimizer import Muon
from dmuon.runtime import runtimes


@torch.compiler.disable
def check_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """For ``torch.optim.optimizer.register_optimizer_step_pre_hook``."""
    check_optimizer(optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where a step of ``optimizer`` would write into dedicated parameters. Local."""
    if isinstance(optimizer, Muon):
        return
    left_to_others = {i for inner in _inner(optimizer) for i in _held(inner)}
    mine = {i for i in _held(optimizer) if i not in left_to_others}
    names = [p.param_name for r in runtimes() for p in r.params if id(p.parameter) in mine]
    if names:
        raise ValueError(
            f"this {type(optimizer).__name__} has the dedicated parameters {listed(names, 3)}, whose gradients their "
            "owners alone have: the ranks would part. Use dmuon.Muon(model), which trains the other parameters with "
            "AdamW; or give it only those that are not dedicated."
        )


def _held(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def _inner(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Of a container or a wrapper: what it holds is checked in steps of its own."""
    for value in vars(optimizer).values():
        several = value.values() if isinstance(value, dict) else value
        held = several if isinstance(value, dict | list | tuple) else [value]
        yield from (one for one in held if isinstance(one, torch.optim.Optimizer))

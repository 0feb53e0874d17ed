"""Weights that ranks came with, and those that they have once the first rank's count."""

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist

from dmuon.errors import listed
from dmuon.names import clean
from dmuon.tensor_parallel import local_part


def fingerprints(named) -> dict[str, float]:
    """By name; two tensors of one shape and another value have another one, as a rule."""
    return {clean(name): _fingerprint(p) for name, p in named if not p.is_meta}


@torch.no_grad()
def _fingerprint(tensor: torch.Tensor) -> tuple[float, float]:
    values = local_part(tensor).double()
    return values.sum().item(), values.square().sum().item()


def warn_changed(before: Mapping, named: Mapping) -> None:
    """Once, on a rank that came with other values."""
    changed = [
        name
        for name, tensor in named.items()
        if name in before and before[name] != _fingerprint(tensor)
    ]
    if changed:
        warnings.warn(
            f"rank {dist.get_rank()} came with other initial values of {listed(changed)} than the rank "
            "they are now taken from. Seed all ranks alike, or ignore this.",
            stacklevel=4,
        )

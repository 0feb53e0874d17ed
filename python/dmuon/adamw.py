"""torch's AdamW for the parameters that the runtime keeps."""

from typing import ClassVar

import torch
from torch.distributed.tensor import DTensor


class SymmetricAdamW:
    """torch's AdamW over the optimizer's own groups and state. Plain parameters of a group
    and those of each mesh go separately: torch does not mix them in one operation. Dedicated ones are the engine's."""

    FLAGS: ClassVar = {
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
    }

    def __init__(self, groups: list[dict], state, dedicated: set[int]):
        self._parts = []
        for group in groups:
            for flag, value in self.FLAGS.items():
                group.setdefault(flag, value)
            params = [p for p in group["params"] if id(p) not in dedicated]
            by_mesh: dict = {}
            for p in params:
                mesh = p.device_mesh if isinstance(p, DTensor) else None
                by_mesh.setdefault(mesh, []).append(p)
            self._parts += [(group, part) for part in by_mesh.values()]
        self.parameters = [p for _, part in self._parts for p in part]
        self._inner = torch.optim.AdamW(self.parameters) if self.parameters else None
        if self._inner is not None:
            self._inner.state = state

    def step(self) -> None:
        if self._inner is None:
            return
        self._inner.param_groups = [
            {**group, "params": part, "decoupled_weight_decay": True} for group, part in self._parts
        ]
        bare_step(self._inner)


def bare_step(optimizer: torch.optim.AdamW) -> None:
    """torch's step without hooks: those of ``dmuon.Muon`` run already, and global ones must not run
    twice."""
    step = type(optimizer).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    step(optimizer)

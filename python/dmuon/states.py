"""What a ``dmuon.Muon`` and the runtime have together, by name and whole."""

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from dmuon.newton_schulz import JORDAN_COEFFICIENTS

MASTER = "master"  # the float32 weight of a 16-bit parameter: an entry that may be missing
PLACING = "tp_distributed_gram"  # says where momenta lie: nothing for a state that is whole
NOT_SETTINGS = ("params", "group_name", "route", "param_names", PLACING)


def torch_settings(agreed: Mapping) -> dict:
    """What a group of ``torch.optim.Muon`` has beside ours. It knows one row of coefficients, Jordan's.

    Args:
        agreed: the settings that ``engine_optimizer`` gives.
    """
    return {
        "nesterov": bool(agreed["nesterov"]),
        "ns_steps": agreed["ns_steps"],
        "adjust_lr_fn": agreed["adjust_lr"],
        "ns_coefficients": JORDAN_COEFFICIENTS[0],
        "eps": 1e-7,
    }


class MuonStates:
    """The parameters, groups and AdamW states that go into a whole dictionary, and come out of one. What the
    engine has of dedicated parameters is not in it."""

    def __init__(self, optimizer, front):
        self._optimizer, self._front = optimizer, front
        names = optimizer.parameter_names()
        self._names = names
        self.parameters = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}

    def engine_state(self, param) -> dict[str, torch.Tensor]:
        """The engine's own memory; empty where it lies elsewhere."""
        return self._optimizer.engine_state(param)

    def groups(self) -> list[dict]:
        """With names for ``params``."""
        return [
            {**group, "params": [self._names[id(p)] for p in group["params"]]}
            for group in self._optimizer.param_groups
        ]

    def torch_settings(self) -> dict:
        return self._optimizer.torch_settings()

    def whole(self, p: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """AdamW's state of what the runtime keeps. Collective: every rank goes through the same keys."""
        held = self._optimizer.state.get(p, {})
        if not float(held.get("step", 0)):  # filled in for a checkpoint; it has never stepped
            return
        for key, value in held.items():
            yield key, value.full_tensor() if isinstance(value, DTensor) else value

    def problem(self, given: Mapping) -> str:
        """What this runtime cannot hold of a dictionary that fits the model; empty where there is nothing."""
        return ""

    def restart(self, names: set[str]) -> None:
        """Comes before ``set``, with the parameters that will have a state."""

    def set(self, p: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """From whole tensors; a parameter without any starts anew."""
        values = dict(values)
        if MASTER in values:  # of a 16-bit one under DeepSpeed
            self._front.assign(p, values.pop(MASTER))
        self._optimizer.set_symmetric_state(p, values)

    def set_groups(self, saved: list[dict]) -> None:
        """Settings of a group are those that its first member was saved with. The last call."""
        for group in self._optimizer.param_groups:
            first = self._names[id(group["params"][0])]
            put(group, _settings(group, next(g for g in saved if first in g["params"])))
        self._optimizer.state_was_loaded()


def plain(value):
    """A setting as it is saved: a learning rate may be a tensor, which training goes on to change."""
    return value.item() if isinstance(value, torch.Tensor) else value


def plain_settings(group: Mapping) -> dict:
    return {key: plain(value) for key, value in group.items()}


def put(group: dict, settings: Mapping) -> None:
    """A setting that is a tensor stays that tensor, which compiled code and schedulers may hold."""
    for key, value in settings.items():
        mine = group.get(key)
        if isinstance(mine, torch.Tensor):
            mine.fill_(float(value))
        else:
            group[key] = value


def _settings(group: Mapping, theirs: Mapping) -> dict:
    settings = {key: theirs[key] for key in group if key in theirs and key not in NOT_SETTINGS}
    if "initial_lr" in theirs:  # a scheduler's
        settings["initial_lr"] = theirs["initial_lr"]
    return {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}

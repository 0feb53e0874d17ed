"""What an ``OwnerOptimizer`` and DeepSpeed have together, by name and whole, as ``dmuon.Muon`` has it."""

from collections.abc import Iterator, Mapping

import torch

from dmuon.adamw import SymmetricAdamW
from dmuon.names import clean
from dmuon.states import MASTER
from dmuon.zero.groups import adamw_lr, by_route, rates_problem, take_settings
from dmuon.zero.partitions import MOMENTS


class ZeroStates:
    """See ``dmuon.states.MuonStates``."""

    def __init__(self, attached):
        self._plan, self._partitions = attached.plan, attached.partitions
        self._optimizer = attached.optimizer
        self.parameters = _named(attached)
        self._names = {id(p): name for name, p in self.parameters.items()}

    def engine_state(self, param) -> dict[str, torch.Tensor]:
        return self._optimizer.engine_state(param)

    def groups(self) -> list[dict]:
        """``<i>/muon`` and ``<i>/adamw`` for each group, empty ones left out."""
        members = self._members()
        found = []
        for i, group in enumerate(self._optimizer.all_groups):
            for route, settings in by_route(group).items():
                names = members[i][route]
                if names:
                    label = {"group_name": f"{i}/{route}", "route": route}
                    found.append({"params": names, **settings, **label, **_others(group, route)})
        return found

    def _members(self) -> list[dict[str, list[str]]]:
        """Names by group and route, in the model's order."""
        dedicated = {id(p.parameter): p for p in self._plan.runtime.params}
        members = [{"muon": [], "adamw": []} for _ in self._optimizer.all_groups]
        for name, p in self.parameters.items():
            param = dedicated.get(id(p))
            route = "adamw" if param is None else param.route
            members[self._optimizer.group_of(p, param)][route].append(name)
        return members

    def torch_settings(self) -> dict:
        return self._optimizer.torch_settings()

    def whole(self, p: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        kept = self._partitions.of(p)
        if kept is None:
            return
        if kept.step:
            yield "step", torch.tensor(kept.step, dtype=torch.float32)
            for key in MOMENTS:
                yield key, kept.get(p, key)
        if (
            kept.is_copy and self._plan.dtypes[id(p)].itemsize < 4
        ):  # the model's dictionary has it rounded
            yield MASTER, kept.get(p)

    def problem(self, given: Mapping) -> str:
        for kept in self._partitions.kept:
            steps: dict[float, str] = {}
            for p in kept.members:
                name = self._names[id(p)]
                entry = given["state"].get(name, {})
                if "step" in entry:
                    steps.setdefault(float(entry["step"]), name)
            if len(steps) > 1:
                (one, first), (other, second) = list(steps.items())[:2]
                return (
                    f"the optimizer's state_dict has {one:g} steps of {first!r} and {other:g} of {second!r}, which "
                    "DeepSpeed counts as one. Put them into different param groups, or use stage 0."
                )
        of_groups = (rates_problem(theirs) for theirs in self._saved(given["param_groups"]))
        return next(filter(None, of_groups), "")

    def _saved(self, groups: list[Mapping]) -> list[dict[str, Mapping]]:
        """For each group of ours, by route, the one that its first member was saved in."""
        return [
            {
                route: next(g for g in groups if names[0] in g["params"])
                for route, names in members.items()
                if names
            }
            for members in self._members()
        ]

    def restart(self, names: set[str]) -> None:
        """As before the first step, before states of these names are set."""
        for kept in self._partitions.kept:
            kept.restart(make=any(self._names[id(p)] in names for p in kept.members))

    def set(self, p: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        if MASTER in values:
            self._partitions.assign(p, values[MASTER])
        kept = self._partitions.of(p)
        if kept is None:
            return
        for key in MOMENTS:
            if key in values:
                kept.set(p, values[key], key)
        if "step" in values:
            kept.set_step(values["step"])

    def set_groups(self, saved: list[dict]) -> None:
        for group, theirs in zip(self._optimizer.all_groups, self._saved(saved), strict=True):
            take_settings(group, theirs)


def _others(group: Mapping, route: str) -> dict:
    """What a group of ``dmuon.Muon``'s has besides."""
    others = dict(SymmetricAdamW.FLAGS) if route == "adamw" else {}
    if "initial_lr" in group:  # a scheduler's
        initial = {**group, "lr": group["initial_lr"]}
        others["initial_lr"] = adamw_lr(initial) if route == "adamw" else initial["lr"]
    return others


def _named(attached) -> dict[str, torch.Tensor]:
    """Each parameter by the first of its names, in the model's order."""
    order = {name: i for i, name in enumerate(attached.plan.names)}
    found = {clean(name): p for name, p in attached.engine.module.named_parameters()}
    for param in attached.runtime.params:
        found[min(param.names, key=lambda name: order.get(name, len(order)))] = param.parameter
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

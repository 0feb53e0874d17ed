"""How a user's groups become the optimizer's: one for each route."""

import math
from collections.abc import Iterable, Mapping

import torch

from dmuon.errors import check_keys, listed

MUON_KEYS = ("lr", "momentum", "weight_decay")
ADAMW_KEYS = ("lr", "betas", "eps", "weight_decay")
# A user's key -> (route, key of the lowered group). A plain "lr" means both routes.
_USER_KEYS = {
    "muon_lr": ("muon", "lr"),
    "momentum": ("muon", "momentum"),
    "muon_weight_decay": ("muon", "weight_decay"),
    "adamw_lr": ("adamw", "lr"),
    "adamw_betas": ("adamw", "betas"),
    "adamw_eps": ("adamw", "eps"),
    "adamw_weight_decay": ("adamw", "weight_decay"),
}
_KNOWN = ("params", "lr", "group_name", *_USER_KEYS)


def lower(
    names: Mapping[int, str],
    dedicated: set[int],
    parameters: list[torch.Tensor],
    param_groups: Iterable[Mapping] | None,
    muon_defaults: dict,
    adamw_defaults: dict,
) -> list[dict]:
    """``<name>/muon`` and ``<name>/adamw`` groups; an empty one is left out.

    Args:
        names: id of a parameter -> its name; exactly the model's parameters.
        dedicated: ids of those on the muon route.
        parameters: the model's, in its order.

    Raises:
        ValueError: an unknown key; a parameter missing, in two groups, or not the model's (any more).
    """
    groups = [{"params": parameters}] if param_groups is None else list(param_groups)
    lowered, seen = [], {}
    for i, group in enumerate(groups):
        name = group.get("group_name", "default" if param_groups is None else f"group{i}")
        _check_keys(name, group)
        members = _members(name, group, names, seen)
        for route, defaults in (("muon", muon_defaults), ("adamw", adamw_defaults)):
            params = [p for p in members if (id(p) in dedicated) == (route == "muon")]
            if params:
                settings = {**defaults, **_settings(group, route)}
                check_settings(f"{name}/{route}", settings)
                lowered.append(
                    {"params": params, **settings, "group_name": f"{name}/{route}", "route": route}
                )
    missing = [name for key, name in names.items() if key not in seen]
    if missing:
        raise ValueError(
            f"param_groups leave out {listed(missing)}. Every parameter of the model must be in one "
            "group; freeze it with requires_grad_(False) to keep it from being trained."
        )
    return lowered


def _check_keys(name: str, group: Mapping) -> None:
    if "params" not in group:
        raise ValueError(f"param group {name!r} has no 'params'.")
    check_keys(f"param group {name!r}", group, _KNOWN)


def _members(name, group, names, seen) -> list[torch.Tensor]:
    given = group["params"]
    members = [given] if isinstance(given, torch.Tensor) else list(given)
    members = [p[1] if isinstance(p, tuple) else p for p in members]
    for p in members:
        if id(p) not in names:
            raise ValueError(
                f"param group {name!r} holds a parameter of shape {tuple(p.shape)} that is not the "
                "model's (any more). Make the groups from model.parameters() after fully_shard."
            )
        if id(p) in seen:
            raise ValueError(
                f"parameter {names[id(p)]!r} is in the param groups {seen[id(p)]!r} and {name!r}. Leave "
                "it in one."
            )
        seen[id(p)] = name
    return members


def _settings(group: Mapping, route: str) -> dict:
    settings = {"lr": group["lr"]} if "lr" in group else {}
    for key, (of_route, lowered) in _USER_KEYS.items():
        if key in group and of_route == route:
            settings[lowered] = group[key]
    return settings


def check_settings(name: str, settings: Mapping) -> None:
    """Raises ValueError naming the group, the key, what was given and what is wanted."""
    for key, low, high in (
        ("lr", 0, math.inf),
        ("momentum", 0, 1),
        ("weight_decay", 0, math.inf),
        ("eps", 0, math.inf),
    ):
        if key not in settings:
            continue
        value = _number(name, key, settings[key])
        if not (low <= value < high):
            wanted = f"in [{low}, {high})" if high < math.inf else "a finite number of at least 0"
            raise ValueError(f"{key} of {name!r} is {settings[key]!r}; it must be {wanted}.")
    betas = settings.get("betas", (0, 0))
    if len(betas) != 2 or any(not 0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas of {name!r} are {betas!r}; they must be two numbers in [0, 1).")


def _number(name: str, key: str, value) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key} of {name!r} is {value!r}; it must be a number.") from None

"""Param groups under DeepSpeed: one of a user's serves Muon and AdamW."""

from collections.abc import Iterable, Mapping
from inspect import Parameter, signature

import torch

from dmuon.errors import check_keys
from dmuon.optimizer import Muon
from dmuon.param_groups import check_settings
from dmuon.zero.config import MUON_KEYS

DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(Muon.__init__).parameters.items()
    if name in MUON_KEYS and parameter.default is not Parameter.empty
}
# What may differ between groups; everything else is one setting of the optimizer.
PER_GROUP = (
    "lr",
    "momentum",
    "weight_decay",
    "adamw_lr",
    "adamw_betas",
    "adamw_weight_decay",
    "adamw_eps",
)


def check_keywords(keywords: Mapping) -> None:
    """Raises ValueError naming an unknown one, or one out of range."""
    check_keys("OwnerOptimizer", keywords, MUON_KEYS)
    settings = {**DEFAULTS, **keywords}
    _group_settings("the optimizer's settings", {}, settings)
    _positive(settings["lr"])


def groups_given(params: Iterable) -> list[dict]:
    """What an optimizer of torch's takes, as groups with lists of parameters. Generators are read once."""
    given = list(params)
    if not given or not isinstance(given[0], Mapping):
        given = [{"params": given}]
    return [{**group, "params": _members(group.get("params", ()))} for group in given]


def _members(params) -> list[torch.Tensor]:
    params = [params] if isinstance(params, torch.Tensor) else params
    return [p[1] if isinstance(p, tuple) else p for p in params]


def make_groups(params: Iterable, runtime, settings: dict) -> tuple[list[dict], list[int]]:
    """Groups of what DeepSpeed manages, and for each dedicated matrix the index of its group."""
    index = {id(p.parameter): p.index for p in runtime.params}
    group_of = [0] * len(index)
    groups = []
    for i, group in enumerate(groups_given(params)):
        check_keys(f"param group {i}", group, ("params", "group_name", *PER_GROUP))
        members = group["params"]
        for p in members:
            if id(p) in index:
                group_of[index[id(p)]] = i
        managed = [p for p in members if id(p) not in index]
        if not any(p.requires_grad for p in managed):
            raise ValueError(
                f"param group {i} has no parameter that DeepSpeed manages and trains, and DeepSpeed drops "
                "empty groups. Put one into it: an embedding, a norm, a bias; or leave the dedicated "
                "parameters out of param groups, where the first one counts for them."
            )
        groups.append({"params": managed, **_group_settings(f"param group {i}", group, settings)})
    return groups, group_of


def _group_settings(where: str, group: Mapping, settings: dict) -> dict:
    values = {key: group.get(key, settings[key]) for key in PER_GROUP}
    if "weight_decay" in group:  # of a group it is both routes'
        values["adamw_weight_decay"] = group.get("adamw_weight_decay", group["weight_decay"])
    betas, eps = tuple(values.pop("adamw_betas")), values.pop("adamw_eps")
    muon = {key: values[key] for key in ("lr", "momentum", "weight_decay")}
    check_settings(where, muon)
    check_settings(
        where,
        {
            "lr": values["adamw_lr"],
            "betas": betas,
            "eps": eps,
            "weight_decay": values["adamw_weight_decay"],
        },
    )
    lr, common = _positive(values["lr"]), _positive(settings["lr"])
    # AdamW's rate is adamw_lr * lr / base_lr.
    values["base_lr"] = lr if "adamw_lr" in group else common
    # DeepSpeed reports "betas" of every group.
    return {**values, "betas": betas, "eps": eps}


def _positive(lr) -> float:
    if float(lr) <= 0:
        raise ValueError(
            f"lr is {lr!r}; it must be above 0: AdamW's rate follows it. Freeze the matrices with "
            "requires_grad_(False) to keep them as they are."
        )
    return float(lr)


def by_route(group: Mapping) -> dict[str, dict]:
    """What a group sets for Muon, and for AdamW."""
    return {
        "muon": {
            "lr": float(group["lr"]),
            "momentum": group["momentum"],
            "weight_decay": group["weight_decay"],
        },
        "adamw": {
            "lr": adamw_lr(group),
            "betas": tuple(group["betas"]),
            "eps": group["eps"],
            "weight_decay": group["adamw_weight_decay"],
        },
    }


def adamw_lr(group: Mapping) -> float:
    return float(group["adamw_lr"]) * (float(group["lr"]) / group["base_lr"])


def rates_problem(saved: Mapping[str, Mapping]) -> str:
    """What a group cannot take of the rates that its two routes were saved with, as ``take_settings`` gets
    them; empty where it can."""
    muon, adamw = (saved.get(route, {}).get("lr") for route in ("muon", "adamw"))
    if muon is None or adamw is None or float(muon) > 0 or float(adamw) == 0:
        return ""
    return (
        f"the optimizer's state_dict has an lr of {float(muon)!r} for Muon and of {float(adamw)!r} for AdamW; in a group "
        "under DeepSpeed AdamW's follows Muon's. Give Muon's an lr above 0, and freeze the matrices."
    )


def take_settings(group: dict, saved: Mapping[str, Mapping]) -> None:
    """A group takes over what its two routes were saved with, in the terms of ``by_route``. Its base rate and
    AdamW's change where otherwise AdamW's would be another one."""
    muon, adamw = saved.get("muon", {}), saved.get("adamw", {})
    group |= {key: muon[key] for key in ("momentum", "weight_decay") if key in muon}
    group |= {key: adamw[key] for key in ("eps",) if key in adamw}
    if "betas" in adamw:
        group["betas"] = tuple(adamw["betas"])
    if "weight_decay" in adamw:
        group["adamw_weight_decay"] = adamw["weight_decay"]
    for key in ("initial_lr", "lr"):
        _take_rate(group, key, muon.get(key), adamw.get(key))


def _take_rate(group: dict, key: str, muon, adamw) -> None:
    if muon is None and adamw is None:
        return
    if muon is None:  # of a group without matrices: what gives AdamW's rate
        factor = float(adamw) / group["adamw_lr"] if group["adamw_lr"] else 1.0
        muon = group["base_lr"] * factor
    group[key] = float(muon)
    if key == "lr" and adamw is not None and adamw_lr(group) != float(adamw):
        group["adamw_lr"], group["base_lr"] = float(adamw), float(muon)

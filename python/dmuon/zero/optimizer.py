"""``OwnerOptimizer``: what DeepSpeed is given as its client optimizer."""

from collections.abc import Iterable, Mapping
from inspect import Parameter, signature

import torch

from dmuon import _C
from dmuon.adamw import bare_step
from dmuon.agreement import raise_everywhere
from dmuon.checkpoint import owned_tensor
from dmuon.errors import nearest
from dmuon.optimizer import Muon, engine_optimizer, state_shapes
from dmuon.param_groups import check_settings
from dmuon.zero import seams
from dmuon.zero.config import MUON_KEYS
from dmuon.zero.section import shape_of

_DEFAULTS = {
    name: parameter.default
    for name, parameter in signature(Muon.__init__).parameters.items()
    if name in MUON_KEYS and parameter.default is not Parameter.empty
}
# What may differ between groups; everything else is one setting of the optimizer.
_PER_GROUP = (
    "lr",
    "momentum",
    "weight_decay",
    "adamw_lr",
    "adamw_betas",
    "adamw_weight_decay",
    "adamw_eps",
)


class OwnerOptimizer(torch.optim.Optimizer):
    """AdamW for what DeepSpeed manages, Muon on the owners for what dmuon does.

    A group serves both: ``lr`` is Muon's. AdamW's rate is ``adamw_lr`` times ``lr`` over the optimizer's
    ``lr`` (over the group's own, where the group has an ``adamw_lr``), so that any scheduler of DeepSpeed's
    or torch's, which write ``lr`` alone, scales both from their own base rates. A group's ``weight_decay``
    is both's, unless it has an ``adamw_weight_decay``. A dedicated parameter named in a group belongs to it; one that is in none, to the first.

    Until ``dmuon.zero.attach`` it does nothing but hold groups.

    Args:
        params: of the model, or groups of them; a group's keys are ``params`` and those of ``dmuon.Muon``
            that may differ: ``lr``, ``momentum``, ``weight_decay``, ``adamw_lr``, ``adamw_betas``,
            ``adamw_weight_decay``, ``adamw_eps``.
        plan: from ``dedicate_params_zero``.
        keywords: those of ``dmuon.Muon``. ``nonfinite`` counts at stage 0 in float32; elsewhere DeepSpeed
            decides.

    Raises:
        ValueError: an unknown keyword; a setting out of range; a group without a parameter of DeepSpeed's;
            a plan that has an optimizer.
    """

    def __init__(self, params: Iterable, *, plan, **keywords):
        check_keywords(keywords)
        if plan.optimizer() is not None:
            raise ValueError("this plan has an OwnerOptimizer already. Make one.")
        self._settings = {**_DEFAULTS, **keywords}
        self._plan = plan
        self._muon = None
        self._attached = None
        self._ns_options = None
        groups, self._group_of = _groups(params, plan.runtime, self._settings)
        # Elements of what DeepSpeed manages, before it makes flat parts of it.
        self._managed = [[shape_of(p).numel() for p in group["params"]] for group in groups]
        super().__init__(groups, {"lr": self._settings["lr"]})
        # What schedulers that cycle momentum look for. With "betas" they would cycle AdamW's alone.
        self.defaults["momentum"] = self._settings["momentum"]
        self._all_groups = self.param_groups
        self._adamw = torch.optim.AdamW([torch.zeros(1)])
        plan.note_optimizer(self)

    @property
    def plan(self):
        return self._plan

    @property
    def dedicated(self) -> "_C.Optimizer":
        """The engine's optimizer of the dedicated matrices; after ``attach``."""
        return self._muon

    def arm(self, attached) -> None:
        """``attach`` calls it: from now on a step is a step. Collective."""
        runtime = self._plan.runtime
        settings = {key: self._settings[key] for key in MUON_KEYS if key not in _PER_GROUP}
        settings["nonfinite"] = settings["nonfinite"] if attached.decides_nonfinite else "propagate"
        try:
            build, agreed = engine_optimizer(runtime, **settings)
        except Exception as error:
            raise_everywhere(runtime.control, error)
        lines = [f"{key}\t{value!r}" for key, value in agreed.items()]
        _C.agree(
            runtime.control.group_name,
            sorted(lines),
            subject="make the same OwnerOptimizer",
            advice="Give the same arguments on every rank.",
        )
        runtime.engine.spread_values()
        self._muon, self._ns_options = build()
        # Two groups of the engine's for one of ours: Muon's settings and AdamW's.
        routes = [param.route == "adamw" for param in runtime.params]
        self._muon.set_groups(
            [2 * group + adamw for group, adamw in zip(self._group_of, routes, strict=True)]
        )
        self._attached = attached

    @property
    def armed(self) -> bool:
        return self._attached is not None

    @torch.no_grad()
    def step(self, closure=None):
        """DeepSpeed's to call, once per group or part of one; the first call of a step updates the
        dedicated matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.armed:
            seams.require_initializing()
            return loss
        if self._attached.update():
            self._step_adamw()
        return loss

    def _step_adamw(self) -> None:
        self._adamw.state = self.state
        self._adamw.param_groups = [
            {
                **self._adamw.defaults,
                "params": group["params"],
                "lr": _adamw_lr(group),
                "betas": tuple(group["betas"]),
                "eps": group["eps"],
                "weight_decay": group["adamw_weight_decay"],
                "decoupled_weight_decay": True,
            }
            for group in self.param_groups
        ]
        bare_step(self._adamw)

    def engine_settings(self) -> list["_C.GroupSettings"]:
        """All groups as the engine reads them: Muon's and AdamW's of each."""
        settings = []
        for i, group in enumerate(self._all_groups):
            for route, values in _by_route(group).items():
                check_settings(f"group {i}/{route}", values)
                settings.append(_C.GroupSettings(**values))
        return settings

    def summarize_groups(self) -> list[dict]:
        """Two for each group, ``<i>/muon`` and ``<i>/adamw``, as ``dmuon.Muon`` has them; empty ones are left
        out."""
        held = [{"muon": [], "adamw": list(sizes)} for sizes in self._managed]
        for param, i in zip(self._plan.runtime.params, self._group_of, strict=True):
            held[i][param.route].append(param.numel)
        return [
            {
                "tensors": len(held[i][route]),
                "numel": sum(held[i][route]),
                "group_name": f"{i}/{route}",
                "route": route,
                **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()},
            }
            for i, group in enumerate(self._all_groups)
            for route, values in _by_route(group).items()
            if held[i][route]
        ]

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._all_groups = self.param_groups

    def engine_state(self, param) -> dict[str, torch.Tensor]:
        """The engine's own memory of a dedicated parameter's state; empty where it lies elsewhere."""
        return self._muon.state(param.index)

    def dedicated_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """By name: this rank's own memory, an ``OwnedTensor`` where the state lies elsewhere."""
        states = {}
        for param in self._plan.runtime.params:
            mine = self.engine_state(param)
            states[param.param_name] = {
                key: mine[key]
                if mine
                else owned_tensor(param, f"{param.param_name}.{key}", torch.float32, shape)
                for key, shape in state_shapes(param).items()
            }
        return states


def check_keywords(keywords: Mapping) -> None:
    """Raises ValueError naming an unknown one, or one out of range."""
    _check_keys("OwnerOptimizer", keywords, MUON_KEYS)
    settings = {**_DEFAULTS, **keywords}
    _group_settings("the optimizer's settings", {}, settings)
    _positive(settings["lr"])


def _check_keys(where: str, given: Mapping, known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{where} has {key!r}, {nearest(key, known)}")


def groups_given(params: Iterable) -> list[dict]:
    """What an optimizer of torch's takes, as groups with lists of parameters. Generators are read once."""
    given = list(params)
    if not given or not isinstance(given[0], Mapping):
        given = [{"params": given}]
    return [{**group, "params": _members(group.get("params", ()))} for group in given]


def _members(params) -> list[torch.Tensor]:
    params = [params] if isinstance(params, torch.Tensor) else params
    return [p[1] if isinstance(p, tuple) else p for p in params]


def _groups(params: Iterable, runtime, settings: dict) -> tuple[list[dict], list[int]]:
    """Groups of what DeepSpeed manages, and for each dedicated matrix the index of its group."""
    index = {id(p.parameter): p.index for p in runtime.params}
    group_of = [0] * len(index)
    groups = []
    for i, group in enumerate(groups_given(params)):
        _check_keys(f"param group {i}", group, ("params", "group_name", *_PER_GROUP))
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
    values = {key: group.get(key, settings[key]) for key in _PER_GROUP}
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


def _by_route(group: Mapping) -> dict[str, dict]:
    """What a group sets for Muon, and for AdamW."""
    return {
        "muon": {
            "lr": float(group["lr"]),
            "momentum": group["momentum"],
            "weight_decay": group["weight_decay"],
        },
        "adamw": {
            "lr": _adamw_lr(group),
            "betas": tuple(group["betas"]),
            "eps": group["eps"],
            "weight_decay": group["adamw_weight_decay"],
        },
    }


def _adamw_lr(group: Mapping) -> float:
    return float(group["adamw_lr"]) * float(group["lr"]) / group["base_lr"]

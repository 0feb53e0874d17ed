"""``OwnerOptimizer``: what DeepSpeed is given as its client optimizer."""

from collections.abc import Iterable

import torch

from dmuon import _C
from dmuon.adamw import bare_step
from dmuon.agreement import raise_everywhere
from dmuon.checkpoint import owned_tensor
from dmuon.dedicated_state import state_shapes
from dmuon.engine_optimizer import engine_optimizer
from dmuon.param_groups import check_settings
from dmuon.states import torch_settings
from dmuon.zero import seams
from dmuon.zero.config import MUON_KEYS
from dmuon.zero.groups import DEFAULTS, PER_GROUP, adamw_lr, by_route, check_keywords, make_groups
from dmuon.zero.section import shape_of


class OwnerOptimizer(torch.optim.Optimizer):
    """AdamW for what DeepSpeed manages, Muon on the owners for what dmuon does.

    A group serves both: ``lr`` is Muon's. AdamW's rate is ``adamw_lr`` times ``lr`` over the optimizer's
    ``lr`` (over the group's own, where the group has an ``adamw_lr``), so that any scheduler of DeepSpeed's
    or torch's, which write ``lr`` alone, scales both from their own base rates. A group's ``weight_decay``
    is both's, unless it has an ``adamw_weight_decay``. A dedicated parameter named in a group belongs to it; one that is in none, to the first.

    Until ``dmuon.zero.attach`` it does nothing but hold groups. Local to make; every rank makes the same.

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
        if not callable(getattr(plan, "optimizer", None)):
            raise ValueError(f"plan is {plan!r}; it must be what dedicate_params_zero returned.")
        if plan.optimizer() is not None:
            raise ValueError("this plan has an OwnerOptimizer already. Make one.")
        self._settings = {**DEFAULTS, **keywords}
        self._plan = plan
        self._muon = None
        self._attached = None
        self._ns_options = None
        groups, self._group_of = make_groups(params, plan.runtime, self._settings)
        # What DeepSpeed manages, by id, before it makes flat parts of it: elements.
        self._managed = [{id(p): shape_of(p).numel() for p in g["params"]} for g in groups]
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
        settings = {key: self._settings[key] for key in MUON_KEYS if key not in PER_GROUP}
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
        self._agreed = agreed
        self._attached = attached

    @property
    def armed(self) -> bool:
        return self._attached is not None

    @torch.no_grad()
    def step(self, closure=None):
        """DeepSpeed's to call, once per group or part of one; the first call of a step updates the
        dedicated matrices. Collective.

        Args:
            closure: as torch's.

        Raises:
            RuntimeError: before ``dmuon.zero.attach``.
        """
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
                "lr": adamw_lr(group),
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
            for route, values in by_route(group).items():
                check_settings(f"group {i}/{route}", values)
                settings.append(_C.GroupSettings(**values))
        return settings

    def summarize_groups(self) -> list[dict]:
        """Two for each group, ``<i>/muon`` and ``<i>/adamw``, as ``dmuon.Muon`` has them; empty ones are left
        out."""
        held = [{"muon": [], "adamw": list(sizes.values())} for sizes in self._managed]
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
            for route, values in by_route(group).items()
            if held[i][route]
        ]

    @property
    def all_groups(self) -> list[dict]:
        """Also while DeepSpeed shows one of them alone."""
        return self._all_groups

    def group_of(self, parameter: torch.Tensor, param) -> int:
        """Index of its group. ``param``: what dmuon has of a dedicated one."""
        if param is not None:
            return self._group_of[param.index]
        return next((i for i, held in enumerate(self._managed) if id(parameter) in held), 0)

    def torch_settings(self) -> dict:
        """What a group of ``torch.optim.Muon`` has beside ours."""
        return torch_settings(self._agreed)

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

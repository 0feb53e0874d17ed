"""``dmuon.Muon``: the optimizer of a model with dedicated parameters."""

import weakref
from collections.abc import Iterable, Mapping
from inspect import signature

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon.adamw import SymmetricAdamW
from dmuon.agreement import raise_everywhere
from dmuon.checkpoint import OwnedTensor, owned_tensor
from dmuon.dedicated_state import as_whole, check_state, my_part, shown_master, state_shapes
from dmuon.engine_optimizer import ADJUST_LR, check_options, engine_optimizer, group_settings
from dmuon.errors import check_keys, choice, listed
from dmuon.names import slots
from dmuon.newton_schulz import NewtonSchulz
from dmuon.param_groups import ADAMW_KEYS, MUON_KEYS, check_settings, lower
from dmuon.runtime import runtime_of_whole
from dmuon.states import MASTER, torch_settings
from dmuon.tensor_parallel import distribute_like

_PLACING = "tp_distributed_gram"  # key of a param group


class Muon(torch.optim.Optimizer):
    """Muon for the dedicated parameters of ``model``, AdamW for all others.

    A ``torch.optim.Optimizer`` in every way: schedulers, step hooks, closures, ``param_groups`` with a
    live ``lr``. Make it after ``fully_shard``.

    Args:
        model: given to ``dedicate_params`` before.
        lr: of Muon; multiplied per matrix by ``adjust_lr``: ``W -= lr * factor * NS(update)``.
        momentum: in [0, 1); ``buf = momentum * buf + grad``, float32, on the owner alone.
        weight_decay: of Muon, decoupled: ``W *= 1 - lr * weight_decay``.
        ns_steps: Newton-Schulz iterations, at least 1.
        adamw_lr, adamw_betas, adamw_weight_decay, adamw_eps: as in ``torch.optim.AdamW``.
        param_groups: ``[{"params": [...], "lr": ..., "group_name": ...}]``; each becomes ``<name>/muon``
            and ``<name>/adamw``. Keys: ``lr`` (of both) or ``muon_lr`` and ``adamw_lr``, ``momentum``,
            ``muon_weight_decay``, ``adamw_weight_decay``, ``adamw_betas``, ``adamw_eps``.
        ns_backend: ``"gram"``, ``"direct"`` or a ``dmuon.NewtonSchulz``.
        nesterov: orthogonalise ``grad + momentum * buf`` instead of ``buf``.
        replicate_async: publish updates beside the next forward; False: ``step`` returns when they are
            published. Bits do not depend on it. Default: True, with tensor parallelism False.
        tp_distributed_gram: tensor parallelism: instead of gradients and updates, the TP ranks exchange
            Gram matrices and factors of the dim that is not cut, in the Gram form.
        tp_distributed_gram_policy: for which matrices: ``"beneficial"``, those for which fewer bytes move;
            ``"always"``, all that are cut along a row or column; ``"never"``.
        adjust_lr: ``"match_rms_adamw"`` 0.2 sqrt(max(m, n)), ``"original"`` sqrt(max(1, m/n)) or
            ``"spectral_unclamped"`` sqrt(m/n) of an ``[m, n]`` matrix, as in ``torch.optim.Muon``.
        adjust_lr_fn: the name that ``torch.optim.Muon`` has for ``adjust_lr``.
        nonfinite: what a NaN or infinity in any gradient does, agreed by all ranks before anything
            changes: ``"raise"``, ``"skip"`` the step, or ``"propagate"``.

    Collective: every rank makes it, with the same arguments.

    Raises:
        ValueError: no dedicated parameters; a setting out of range, or not the same on every rank; a
            parameter missing from ``param_groups``, or in two of them.
    """

    # Read by torch.amp.GradScaler: it hands itself to `step`, which refuses it by name.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        lr: float | torch.Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adamw_lr: float | torch.Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_weight_decay: float = 0.01,
        adamw_eps: float = 1e-8,
        param_groups: Iterable[Mapping] | None = None,
        ns_backend: str | NewtonSchulz = "gram",
        nesterov: bool = True,
        replicate_async: bool | None = None,
        tp_distributed_gram: bool = False,
        tp_distributed_gram_policy: str = "beneficial",
        adjust_lr: str = ADJUST_LR[0],
        nonfinite: str = "raise",
        *,
        adjust_lr_fn: str | None = None,
    ):
        self._runtime = runtime = runtime_of_whole(model)
        self._model = weakref.ref(runtime.model())
        try:
            _check_policy(tp_distributed_gram_policy)
            placing = tp_distributed_gram_policy if tp_distributed_gram else "never"
            build, agreed = engine_optimizer(
                runtime,
                ns_backend=ns_backend,
                ns_steps=ns_steps,
                nesterov=nesterov,
                replicate_async=replicate_async,
                adjust_lr=adjust_lr,
                adjust_lr_fn=adjust_lr_fn,
                nonfinite=nonfinite,
                sharded_gram=placing,
            )
            runtime.prepare_for_optimizer()
            muon = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
            adamw = {
                "lr": adamw_lr,
                "betas": tuple(adamw_betas),
                "eps": adamw_eps,
                "weight_decay": adamw_weight_decay,
            }
            super().__init__(self._groups(param_groups, muon, adamw), {"lr": lr})
            self.defaults["momentum"] = momentum  # what CyclicLR and OneCycleLR look for
        except Exception as error:
            raise_everywhere(runtime.control, error)
        self._agree(
            **agreed, tp_distributed_gram=(bool(tp_distributed_gram), tp_distributed_gram_policy)
        )
        runtime.engine.spread_values()
        self._muon, self._ns_options = build()
        self._agreed = agreed
        if runtime.axes.sizes[2] > 1:
            for group in self.param_groups:
                group[_PLACING] = placing
        for index, param in enumerate(runtime.params):
            param.in_shards = index in self._muon.in_shards()
        self._symmetric = _C.SymmetricGradients()
        self._checked_parameters = False
        self._read_groups()
        self._place_state()
        runtime.optimizer = weakref.ref(self)

    def _groups(self, param_groups, muon: dict, adamw: dict) -> list[dict]:
        self._names, parameters = self._model_parameters()
        on_muon = {id(p.parameter) for p in self._runtime.params if p.route == "muon"}
        return lower(self._names, on_muon, parameters, param_groups, muon, adamw)

    def _agree(self, **settings) -> None:
        """What changes collectives or bits must be equal on all ranks; learning rates are compared at
        each step."""
        lines = [f"{key}\t{value!r}" for key, value in settings.items()]
        lines += [
            f"{self._names[id(p)]}\tgroup {group['group_name']!r}"
            for group in self.param_groups
            for p in group["params"]
        ]
        _C.agree(
            self._runtime.control.group_name,
            sorted(lines),
            subject="make the same dmuon.Muon",
            advice="Give the same arguments on every rank.",
        )

    def _model_parameters(self) -> tuple[dict[int, str], list[torch.Tensor]]:
        names: dict[int, str] = {}
        parameters = []
        for name, _, _, parameter in slots(self._model()):
            if id(parameter) not in names:
                names[id(parameter)] = name
                parameters.append(parameter)
        return names, parameters

    def _read_groups(self) -> None:
        """Which group each parameter is in."""
        index = {id(p.parameter): p.index for p in self._runtime.params}
        group_of = [0] * len(index)
        for i, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if id(parameter) in index:
                    group_of[index[id(parameter)]] = i
        self._muon.set_groups(group_of)
        adamw = [group for group in self.param_groups if group["route"] == "adamw"]
        self._adamw = SymmetricAdamW(adamw, self.state, set(index))
        # By name: the same index means the same parameter on every rank.
        self._symmetric_parameters = sorted(
            self._adamw.parameters, key=lambda p: self._names[id(p)]
        )
        self._symmetric.names = [self._names[id(p)] for p in self._symmetric_parameters]

    def _place_state(self) -> None:
        """The owner's state is the engine's own memory; elsewhere its name and shape."""
        for param in self._runtime.params:
            mine = self._muon.state(param.index)
            self.state[param.parameter] = {
                key: as_whole(param, key, mine[key])
                if mine
                else owned_tensor(param, f"{param.param_name}.{key}", torch.float32, shape)
                for key, shape in state_shapes(param).items()
            }
            if param.dtype.itemsize < 4:  # the model's state dict has it rounded
                self.state[param.parameter][MASTER] = shown_master(param)

    def parameter_names(self) -> dict[int, str]:
        """id of a parameter -> its first name."""
        return {id(p): self._names[id(p)] for g in self.param_groups for p in g["params"]}

    def torch_settings(self) -> dict:
        """What a group of ``torch.optim.Muon`` has beside ours."""
        return torch_settings(self._agreed)

    def engine_state(self, param) -> dict[str, torch.Tensor]:
        """The engine's own memory of a dedicated parameter's state; empty where it lies elsewhere."""
        return self._muon.state(param.index)

    def set_symmetric_state(self, p: torch.Tensor, whole: dict[str, torch.Tensor]) -> None:
        """AdamW's state of a parameter that the runtime keeps, from whole tensors; none starts anew."""
        self.state.pop(p, None)
        if whole:
            self.state[p] = {
                key: value.clone() if key == "step" else distribute_like(p, value.to(p.dtype))
                for key, value in whole.items()
            }

    def fill_state(self) -> None:
        """AdamW's state of every parameter that has none yet, as its first step would find it."""
        fused = {
            id(p) for group in self.param_groups if group.get("fused") for p in group["params"]
        }
        for p in self._symmetric_parameters:
            if p.requires_grad and not self.state.get(p):
                zeros = [torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2)]
                device = p.device if id(p) in fused else None  # where torch's fused kernel reads it
                step = torch.zeros((), dtype=torch.float32, device=device)
                self.state[p] = {"step": step, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}

    def state_was_loaded(self) -> None:
        """Groups and state have been written to."""
        self._read_groups()
        self._place_state()

    def add_param_group(self, param_group: dict) -> None:
        """Refused once the optimizer is made, which trains every parameter from the start. Local.

        Args:
            param_group: as ``param_groups=`` takes them.

        Raises:
            ValueError: always, for a caller.
        """
        super().add_param_group(param_group)
        if hasattr(self, "_muon"):
            raise ValueError(
                "dmuon.Muon trains every parameter of its model from the start; there is none to add. "
                "Give all groups as param_groups=."
            )

    def step(self, closure=None, *, grad_scaler=None):
        """Update every parameter that has a gradient on any rank. Collective.

        Waits for reductions, runs Newton-Schulz on the owners and AdamW on every rank, and publishes.
        A step in which no rank has a gradient changes nothing.

        Args:
            closure: re-evaluates the model and returns the loss.
            grad_scaler: what ``torch.amp.GradScaler`` passes; refused.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient is not finite (``nonfinite="raise"``), or ranks ran different
                passes. On all ranks, with the same text; nothing has changed.
            ValueError: settings of ``param_groups`` out of range, or not the same on every rank; parameters
                that were replaced since. On all ranks, likewise.
        """
        if grad_scaler is not None:
            refuse_grad_scaler(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settings, error = self._settings_now()
        with torch.no_grad():
            _C.read_symmetric(self._symmetric, self._symmetric_parameters)
            if self._muon.step(settings, self._symmetric, error):
                self._adamw.step()
        self._runtime.after_step()
        return loss

    def _settings_now(self) -> tuple[list["_C.GroupSettings"], str]:
        """The groups as the engine reads them, or what is wrong with them: all ranks will raise it."""
        try:
            if self._runtime.optimizer() is not self:
                raise ValueError(
                    "another dmuon.Muon was made for this model after this one, and its state is what a checkpoint "
                    "saves. Make one, and step the last one made."
                )
            self._runtime.prepare_for_optimizer()
            if not self._checked_parameters:
                self._check_parameters()
            return [group_settings(group) for group in self.param_groups], ""
        except ValueError as error:
            return [], str(error)

    def _check_parameters(self) -> None:
        """fully_shard makes new Parameter objects; an optimizer made before it holds the old ones."""
        current, _ = self._model_parameters()
        mine = [p for group in self.param_groups for p in group["params"]]
        # A DTensor that is not in its slot is FSDP2's: whole now, and back after the next forward.
        stale = [
            self._names[id(p)] for p in mine if id(p) not in current and not isinstance(p, DTensor)
        ]
        if stale:
            raise ValueError(
                f"{listed(stale)} were replaced after dmuon.Muon was made, so it would train weights that "
                "the model does not use. Make dmuon.Muon after fully_shard and to_empty."
            )
        self._checked_parameters = True

    def state_dict(self) -> dict:
        """As torch's. A momentum that lies on another rank is an ``OwnedTensor``: it cannot be read or
        saved here, so that nothing is silently missing. AdamW's state is there before the first step, as zeros, and
        a 16-bit dedicated weight has its float32 ``master``. Local."""
        self._runtime.engine.wait_reductions()
        self._runtime.engine.wait_publishes()
        self.fill_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's. Each owner takes the state of its matrices, zeros where there is none; an
        ``OwnedTensor`` is fine where this rank does not own it. Local; every rank loads its own.

        Args:
            state_dict: what ``state_dict`` gave on this rank, or a whole one.

        Raises:
            ValueError: state of a dedicated parameter lacks an entry, or has another shape.
        """
        self._check_placing(state_dict)
        dedicated = self._dedicated_in(state_dict)
        rest = {key: value for key, value in state_dict["state"].items() if key not in dedicated}
        super().load_state_dict({**state_dict, "state": rest})
        for param, values in dedicated.values():
            for key, mine in self._muon.state(param.index).items():
                mine.zero_() if values is None else mine.copy_(my_part(param, key, values[key]))
            if values is not None and MASTER in values:
                self._load_master(param, values[MASTER])
        self._read_groups()
        self._place_state()

    def _load_master(self, param, value: torch.Tensor) -> None:
        if not isinstance(value, OwnedTensor):
            self._runtime.set_value(param, value)
        else:  # its owner loads it
            self._runtime.engine.mark_changed(param.index)

    def _check_placing(self, state_dict: dict) -> None:
        """Where momenta lie depends on tp_distributed_gram: every rank sees from the groups if it is
        another one."""
        for mine, saved in zip(self.param_groups, state_dict["param_groups"]):
            given = saved.get(_PLACING, mine.get(_PLACING))
            if given != mine.get(_PLACING):
                raise ValueError(
                    f"the optimizer state was saved with tp_distributed_gram: {given}, and this "
                    f"dmuon.Muon has {mine.get(_PLACING)}; momenta lie on other ranks. Make it with the "
                    "same setting."
                )

    def _dedicated_in(self, state_dict: dict) -> dict:
        """Index in the state dict -> (parameter, its state), checked before anything is loaded."""
        mine = [p for group in self.param_groups for p in group["params"]]
        theirs = [i for group in state_dict["param_groups"] for i in group["params"]]
        by_id = {id(p.parameter): p for p in self._runtime.params}
        found = {}
        for parameter, i in zip(mine, theirs):
            param = by_id.get(id(parameter))
            if param is not None and i in state_dict["state"]:
                check_state(param, state_dict["state"][i], bool(self._muon.state(param.index)))
                found[i] = (param, state_dict["state"][i])
            elif param is not None:  # never stepped, as torch has it
                found[("fresh", i)] = (param, None)
        return found


def check_keywords(where: str, given: Mapping) -> None:
    """Raises ValueError where ``Muon(model, **given)`` would, as far as can be told before the model is sharded. Local."""
    known = {k: p.default for k, p in signature(Muon).parameters.items() if k != "model"}
    check_keys(where, given, tuple(known))
    options = {**known, **given}
    _check_policy(options["tp_distributed_gram_policy"])
    check_options(**{key: options[key] for key in signature(check_options).parameters})
    check_settings("default/muon", {key: options[key] for key in MUON_KEYS})
    check_settings("default/adamw", {key: options[f"adamw_{key}"] for key in ADAMW_KEYS})


def _check_policy(policy: str) -> None:
    choice("tp_distributed_gram_policy", policy, ("beneficial", "always", "never"))


def refuse_grad_scaler(optimizer) -> None:
    """Raises RuntimeError where ``torch.amp.GradScaler`` is used with a ``Muon``."""
    if isinstance(optimizer, Muon):
        raise RuntimeError(
            "dmuon.Muon does not take torch.amp.GradScaler, which sees only this rank's part of the "
            "gradients. Train in bfloat16, which needs no loss scaling, and call optimizer.step()."
        )

"""FSDP2: it skips dedicated parameters, and what its modules are told reaches the engine."""

import functools
import sys
import warnings
from collections.abc import Iterator, Set

import torch
import torch.distributed.fsdp as public
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from dmuon.names import clean

_SETTERS = {
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_gradient_divide_factor": "gradient_divide_factor",
}
# Name -> the original, of everything that install_patch replaced.
_originals: dict[str, object] = {}


class _Ignored(Set):
    """The dedicated parameters of a model, or of all models: whatever object their slots hold when
    asked, since ``to_empty`` and ``.to`` replace Parameter objects."""

    def __init__(self, model: nn.Module | None = None):
        self._model = model

    @classmethod
    def _from_iterable(cls, parameters) -> set:
        """What `|`, `&` and `-` give: a plain set."""
        return set(parameters)

    def _current(self) -> Iterator[nn.Parameter]:
        from dmuon.runtime import runtime_of, runtimes

        owners = runtimes() if self._model is None else [runtime_of(self._model)]
        for runtime in owners:
            for param in runtime.params:
                for slot in param.slots:
                    yield slot.current

    def __contains__(self, parameter) -> bool:
        return any(parameter is current for current in self._current())

    def __iter__(self):
        return iter({id(p): p for p in self._current()}.values())

    def __len__(self) -> int:
        return len({id(p) for p in self._current()})


class _Union(Set):
    def __init__(self, *sets):
        self._sets = sets

    def __contains__(self, parameter) -> bool:
        return any(parameter in s for s in self._sets)

    def __iter__(self):
        return iter({id(p): p for s in self._sets for p in s}.values())

    def __len__(self) -> int:
        return len({id(p) for s in self._sets for p in s})


def ignored_params(model: nn.Module) -> Set:
    """The dedicated parameters of ``model``, for ``fully_shard(..., ignored_params=)``.

    Live: it follows ``to_empty`` and other calls that make new Parameter objects. Local.

    Raises:
        ValueError: the model has no dedicated parameters.
    """
    from dmuon.runtime import runtime_of

    runtime_of(model)
    return _Ignored(model)


def install_patch() -> None:
    """Make FSDP2 skip dedicated parameters, however the caller bound ``fully_shard``. Idempotent.

    Called on ``import dmuon``. It sets the default of ``fully_shard``'s public keyword
    ``ignored_params``, rebinds the public name for callers that pass their own set, and wraps the
    public setters of ``FSDPModule``, ``register_fsdp_forward_method``, ``clip_grad_norm_`` and
    ``GradScaler.unscale_``.
    """
    if _originals:
        return
    original = public.fully_shard
    defaults = getattr(getattr(original, "__wrapped__", None), "__kwdefaults__", None)
    _originals["fully_shard"] = original
    if defaults is not None and "ignored_params" in defaults:
        _originals["default"] = defaults["ignored_params"]
        defaults["ignored_params"] = _Ignored()
    else:
        warnings.warn(
            "this torch's fully_shard has no default for ignored_params that dmuon can set; modules "
            "that imported fully_shard before dmuon must pass ignored_params=dmuon.ignored_params(model).",
            stacklevel=2,
        )
    _rebind(original, _wrap_fully_shard(original))
    for name, field in _SETTERS.items():
        _patch(FSDPModule, name, _wrap_setter(name, field))
    register = public.register_fsdp_forward_method
    _originals["register_fsdp_forward_method"] = register
    _rebind(register, _wrap_register(register))
    _patch(torch.amp.GradScaler, "unscale_", _wrap_unscale(torch.amp.GradScaler.unscale_))
    _originals["clip_grad_norm_"] = clip_grad.clip_grad_norm_
    _rebind(clip_grad.clip_grad_norm_, _wrap_clip(clip_grad.clip_grad_norm_))


def uninstall_patch() -> None:
    """Undo ``install_patch``. Idempotent. Models that are set up keep working; their later
    ``fully_shard`` calls need ``ignored_params=``."""
    if not _originals:
        return
    for name in ("fully_shard", "register_fsdp_forward_method"):
        _rebind(getattr(public, name), _originals[name])
    _rebind(clip_grad.clip_grad_norm_, _originals["clip_grad_norm_"])
    if "default" in _originals:
        defaults = _originals["fully_shard"].__wrapped__.__kwdefaults__
        defaults["ignored_params"] = _originals["default"]
    for name in _SETTERS:
        setattr(FSDPModule, name, _originals[name])
    torch.amp.GradScaler.unscale_ = _originals["unscale_"]
    _originals.clear()


def original_setter(name: str):
    """A public setter of FSDPModule without our wrapper."""
    return _originals.get(name) or getattr(FSDPModule, name)


def _patch(owner, name: str, replacement) -> None:
    _originals[name] = getattr(owner, name)
    setattr(owner, name, replacement)


def _rebind(old, new) -> None:
    """Every module attribute that is ``old`` becomes ``new``: also early ``from ... import``."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old and module.__name__ != __name__:
                setattr(module, name, new)


def _wrap_fully_shard(original):
    @functools.wraps(original)
    def fully_shard(module, *args, ignored_params=None, **kwargs):
        given = [_Ignored()] if ignored_params is None else [_Ignored(), ignored_params]
        return original(module, *args, ignored_params=_Union(*given), **kwargs)

    return fully_shard


def _wrap_setter(name: str, field: str):
    original = getattr(FSDPModule, name)

    @functools.wraps(original)
    def setter(self, value, *args, **kwargs):
        original(self, value, *args, **kwargs)
        recurse = kwargs.get("recurse", args[0] if args else True)
        for unit in _units_under(self, recurse):
            setattr(unit, field, value)

    return setter


def _units_under(module: FSDPModule, recurse: bool):
    """Settings of the units whose boundary lies in ``module``; without ``recurse`` only of those
    that no FSDP module below it holds."""
    from dmuon.runtime import runtimes

    inside = {id(m) for m in module.modules()}
    for runtime in runtimes():
        for param in runtime.params:
            holder = param.slots[0].module()
            if id(holder) not in inside:
                continue
            if recurse or _enclosing(module, holder) is module:
                yield runtime.adapter.unit(runtime.engine.unit_of(param.index))


def _enclosing(root: nn.Module, target: nn.Module) -> FSDPModule | None:
    """The innermost FSDP module on the way from ``root`` to ``target``."""
    return next((fsdp for module, fsdp in _with_enclosing(root) if module is target), None)


def _with_enclosing(module: nn.Module, fsdp=None):
    fsdp = module if isinstance(module, FSDPModule) else fsdp
    yield module, fsdp
    for child in module.children():
        yield from _with_enclosing(child, fsdp)


def _wrap_register(original):
    @functools.wraps(original)
    def register_fsdp_forward_method(module, method_name):
        original(module, method_name)
        _wrap_forward_method(module, method_name)

    return register_fsdp_forward_method


def _wrap_forward_method(module: nn.Module, method_name: str) -> None:
    """Module hooks do not run for such a method; ours do their work around it."""
    from dmuon.runtime import runtimes

    boundaries = [
        b for runtime in runtimes() for b in runtime.boundary_hooks if b.module() is module
    ]
    if not boundaries or not hasattr(module, method_name):
        return
    method = getattr(module, method_name)

    @functools.wraps(method)
    def with_whole_weights(*args, **kwargs):
        for boundary in boundaries:
            boundary.enter()
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            for boundary in reversed(boundaries):
                boundary.leave(output)
        return output

    setattr(module, method_name, with_whole_weights)


def _wrap_clip(original):
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None
    ):
        from dmuon.control import clip_dedicated

        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = clip_dedicated(given, max_norm, norm_type, error_if_nonfinite)
        if norm is None:
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm

    return clip_grad_norm_


def _wrap_unscale(original):
    @functools.wraps(original)
    def unscale_(self, optimizer):
        from dmuon.optimizer import refuse_grad_scaler

        refuse_grad_scaler(optimizer)
        return original(self, optimizer)

    return unscale_


def check_slot(param) -> None:
    """Raises ValueError where FSDP2 took a dedicated parameter."""
    current = param.parameter
    if isinstance(current, DTensor):
        raise ValueError(
            f"fully_shard took the dedicated parameter {param.param_name!r}: this call did not see "
            "dmuon's set. Import dmuon before the module that calls fully_shard, or pass "
            "fully_shard(..., ignored_params=dmuon.ignored_params(model))."
        )


def settle(runtime) -> None:
    """What the enclosing fully_shard was told becomes the unit's dtypes."""
    for param in runtime.params:
        check_slot(param)
    model = runtime.model()
    enclosing = {id(module): fsdp for module, fsdp in _with_enclosing(model)}
    for param in runtime.params:
        policy = _mp_policy(enclosing.get(id(param.slots[0].module())))
        unit = runtime.adapter.unit(runtime.engine.unit_of(param.index))
        param_dtype = param.policy.param_dtype or getattr(policy, "param_dtype", None)
        unit.compute_dtype = param_dtype or param.dtype
        reduce_dtype = param.policy.grad_dtype or getattr(policy, "reduce_dtype", None)
        if reduce_dtype is None:
            reduce_dtype = unit.compute_dtype if policy is not None else torch.float32
        # Sums are float32; float64 gradients travel as float32 too.
        unit.reduce_dtype = torch.float32 if reduce_dtype == torch.float64 else reduce_dtype


def _mp_policy(fsdp: FSDPModule | None):
    """The MixedPrecisionPolicy given to fully_shard; torch offers no public way to read it."""
    if fsdp is None:
        return None
    state = fsdp._get_fsdp_state() if hasattr(fsdp, "_get_fsdp_state") else None
    policy = getattr(state, "_mp_policy", None)
    if policy is None:
        warnings.warn(
            f"this torch does not say which MixedPrecisionPolicy {clean(type(fsdp).__name__)} has; set "
            "param_policy={'defaults': {'param_dtype': ..., 'grad_dtype': ...}} in dedicate_params.",
            stacklevel=2,
        )
    return policy

"""What ``import dmuon`` changes in torch, and how it is undone."""

import contextlib
import functools
import sys
import warnings
import weakref
from collections import defaultdict

import torch
import torch.distributed.fsdp as public
import torch.distributed.tensor.parallel as parallel
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dmuon import replicas
from dmuon.errors import listed
from dmuon.fsdp2 import Ignored, Union, units_under, wrap_forward_method
from dmuon.integrations import seams
from dmuon.other_optimizers import check_step
from dmuon.zero.initialize import install as install_zero
from dmuon.zero.initialize import uninstall as uninstall_zero

_SETTERS = {
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_gradient_divide_factor": "gradient_divide_factor",
}
# Name -> the original, of everything that install_patch replaced.
_originals: dict[str, object] = {}


# What the user has given to set_requires_gradient_sync.
_gradient_sync: "weakref.WeakKeyDictionary[torch.nn.Module, bool]" = weakref.WeakKeyDictionary()


def users_gradient_sync(module: FSDPModule) -> bool:
    """What the user last gave to ``set_requires_gradient_sync`` of ``module``."""
    return _gradient_sync.get(module, True)


def install_patch() -> None:
    """Make FSDP2 skip dedicated parameters, however the caller bound ``fully_shard``. Idempotent. Local.

    Called on ``import dmuon``. It sets the default of ``fully_shard``'s public keyword
    ``ignored_params``, rebinds the public name for callers that pass their own set, and wraps the
    public setters of ``FSDPModule``, ``register_fsdp_forward_method``, ``clip_grad_norm_``,
    ``clip_grads_with_norm_``, ``clip_grad_value_``, ``parallelize_module``, ``GradScaler.unscale_``, and the constructor and ``no_sync`` of
    ``DistributedDataParallel``; has torch call a check before each optimizer's step; and, once they are imported, wraps
    ``deepspeed.initialize`` and methods of ``accelerate.Accelerator`` and ``transformers.Trainer``.
    """
    if _originals:
        return
    original = public.fully_shard
    defaults = getattr(getattr(original, "__wrapped__", None), "__kwdefaults__", None)
    _originals["fully_shard"] = original
    if defaults is not None and "ignored_params" in defaults:
        _originals["default"] = defaults["ignored_params"]
        defaults["ignored_params"] = Ignored()
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
    _patch(DistributedDataParallel, "no_sync", _wrap_no_sync(DistributedDataParallel.no_sync))
    _patch(DistributedDataParallel, "__init__", _wrap_ddp(DistributedDataParallel.__init__))
    _patch(torch.amp.GradScaler, "unscale_", _wrap_unscale(torch.amp.GradScaler.unscale_))
    scaling = torch.nn.utils.clip_grads_with_norm_
    _originals["clip_grads_with_norm_"] = scaling
    _rebind(scaling, _wrap_scaling(scaling))
    _originals["parallelize_module"] = parallel.parallelize_module
    _rebind(parallel.parallelize_module, _wrap_parallelize(parallel.parallelize_module))
    _originals["clip_grad_norm_"] = clip_grad.clip_grad_norm_
    _rebind(clip_grad.clip_grad_norm_, _wrap_clip(clip_grad.clip_grad_norm_))
    _originals["clip_grad_value_"] = clip_grad.clip_grad_value_
    _rebind(clip_grad.clip_grad_value_, _wrap_clip_value(clip_grad.clip_grad_value_))
    _originals["step_hook"] = register_optimizer_step_pre_hook(check_step)
    install_zero()
    seams.install()


def uninstall_patch() -> None:
    """Undo ``install_patch``. Idempotent. Models that are set up keep working; their later
    ``fully_shard`` calls need ``ignored_params=``. Local."""
    if not _originals:
        return
    for name in ("fully_shard", "register_fsdp_forward_method"):
        _rebind(getattr(public, name), _originals[name])
    _rebind(clip_grad.clip_grad_norm_, _originals["clip_grad_norm_"])
    _rebind(clip_grad.clip_grad_value_, _originals["clip_grad_value_"])
    _rebind(torch.nn.utils.clip_grads_with_norm_, _originals["clip_grads_with_norm_"])
    _rebind(parallel.parallelize_module, _originals["parallelize_module"])
    if "default" in _originals:
        defaults = _originals["fully_shard"].__wrapped__.__kwdefaults__
        defaults["ignored_params"] = _originals["default"]
    for name in _SETTERS:
        setattr(FSDPModule, name, _originals[name])
    torch.amp.GradScaler.unscale_ = _originals["unscale_"]
    for name in ("no_sync", "__init__"):
        setattr(DistributedDataParallel, name, _originals[name])
    _originals["step_hook"].remove()
    uninstall_zero()
    seams.uninstall()
    _originals.clear()


def original(name: str):
    """A public method of FSDPModule or DistributedDataParallel without our wrapper."""
    owner = FSDPModule if hasattr(FSDPModule, name) else DistributedDataParallel
    return _originals.get(name) or getattr(owner, name)


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
        replicas.check_shard(module)
        given = [Ignored()] if ignored_params is None else [Ignored(), ignored_params]
        return original(module, *args, ignored_params=Union(*given), **kwargs)

    return fully_shard


def _wrap_setter(name: str, field: str):
    original = getattr(FSDPModule, name)

    @functools.wraps(original)
    def setter(self, value, *args, **kwargs):
        original(self, value, *args, **kwargs)
        recurse = kwargs.get("recurse", args[0] if args else name != "set_gradient_divide_factor")
        if name == "set_requires_gradient_sync":
            for module in self.modules() if recurse else [self]:
                _gradient_sync[module] = value
        for unit in units_under(self, recurse):
            setattr(unit, field, value)

    return setter


def _wrap_register(original):
    @functools.wraps(original)
    def register_fsdp_forward_method(module, method_name):
        original(module, method_name)
        wrap_forward_method(module, method_name)

    return register_fsdp_forward_method


def _wrap_ddp(original):
    @functools.wraps(original)
    def __init__(self, module, *args, **kwargs):
        replicas.check_wrap(module)
        original(self, module, *args, **kwargs)
        replicas.note_wrapped(module, self)

    return __init__


def _wrap_no_sync(original):
    """Dedicated gradients are not reduced either."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def no_sync(self):
        from dmuon.control import held
        from dmuon.runtime import runtime_of

        runtime = runtime_of(self, optional=True)
        with original(self), contextlib.nullcontext() if runtime is None else held(runtime):
            yield

    return no_sync


def _wrap_parallelize(original):
    """It would distribute placeholders: it comes before dedicate_params, and says so."""

    @functools.wraps(original)
    def parallelize_module(module, *args, **kwargs):
        taken = [name for name, p in module.named_parameters() if p in Ignored()]
        if taken:
            raise ValueError(
                f"parallelize_module after dedicate_params: {listed(taken)} of this "
                f"{type(module).__name__} are dedicated already. Call parallelize_module first, then "
                "dedicate_params, then fully_shard."
            )
        return original(module, *args, **kwargs)

    return parallelize_module


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


def _wrap_clip_value(original):
    """Element by element, so that each rank clips what it has; those of each mesh apart, which torch does not mix in
    one operation."""

    @functools.wraps(original)
    def clip_grad_value_(parameters, clip_value, foreach=None):
        from dmuon.control import refuse_under_deepspeed

        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        refuse_under_deepspeed(given)
        if not any(map(seams.is_dedicated, given)):
            return original(given, clip_value, foreach)
        by_mesh = defaultdict(list)
        for p in given:
            if p.grad is not None:  # torch refuses a list without any
                by_mesh[getattr(p.grad, "device_mesh", None)].append(p)
        for part in by_mesh.values():
            original(part, clip_value, foreach)

    return clip_grad_value_


def _wrap_scaling(original):
    """The second half of clipping: who does the halves apart has a norm without dedicated gradients."""

    @functools.wraps(original)
    def clip_grads_with_norm_(parameters, *args, **kwargs):
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(map(seams.is_dedicated, given)):
            raise ValueError(
                "clip_grads_with_norm_ was given dedicated parameters, whose gradients lie on their owners: "
                "get_total_norm has not seen them. Call dmuon.clip_grad_norm_(optimizer, max_norm), or "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)."
            )
        return original(given, *args, **kwargs)

    return clip_grads_with_norm_


def _wrap_unscale(original):
    @functools.wraps(original)
    def unscale_(self, optimizer):
        from dmuon.optimizer import refuse_grad_scaler

        refuse_grad_scaler(optimizer)
        return original(self, optimizer)

    return unscale_

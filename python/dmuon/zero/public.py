"""Public calls of DeepSpeed's and torch's users that would pass over dedicated parameters without a word."""

import functools
import sys
import warnings
import weakref

import torch
import torch.distributed as dist
from torch import nn

from dmuon.checkpoint import from_owner
from dmuon.zero.helpers import dedicated_of

# Walks of theirs are meant for what DeepSpeed manages, or do no harm.
_SILENT = ("deepspeed", "dmuon", "accelerate", "transformers", "peft")
# Model -> the lines that were warned about it, and how many it has.
_attached: "weakref.WeakKeyDictionary[nn.Module, tuple[set, int]]" = weakref.WeakKeyDictionary()


def install(attached) -> None:
    """What ``attach`` does about them."""
    for module in attached.runtime.model().modules():
        count = len(list(_dedicated_in(module)))
        if count:
            _attached[module] = set(), count
    if not hasattr(nn.Module.named_parameters, "_dmuon"):
        nn.Module.named_parameters = _named_parameters(nn.Module.named_parameters)
        nn.Module.requires_grad_ = _requires_grad(nn.Module.requires_grad_)


def uninstall() -> None:
    if hasattr(nn.Module.named_parameters, "_dmuon"):
        nn.Module.named_parameters = nn.Module.named_parameters.__wrapped__
        nn.Module.requires_grad_ = nn.Module.requires_grad_.__wrapped__


def _dedicated_in(module: nn.Module):
    return (b for b in module.buffers() if hasattr(b, "_dedicated_owner_rank"))


def _requires_grad(original):
    """Freezing a module freezes what is hidden in it, too."""

    @functools.wraps(original)
    def requires_grad_(self, requires_grad: bool = True):
        if self in _attached:
            for parameter in _dedicated_in(self):
                parameter.requires_grad_(requires_grad)
        return original(self, requires_grad)

    return requires_grad_


def _named_parameters(original):
    @functools.wraps(original)
    def named_parameters(self, *args, **kwargs):
        if self in _attached:
            _warn(self)
        return original(self, *args, **kwargs)

    named_parameters._dmuon = True
    return named_parameters


def _warn(model: nn.Module) -> None:
    """Once per line that asks, unless it is of one who knows better."""
    frame, level = sys._getframe(2), 3
    while frame.f_globals.get("__name__") == "torch.nn.modules.module" and frame.f_back:
        frame, level = frame.f_back, level + 1
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    lines, count = _attached[model]
    line = frame.f_code, frame.f_lineno
    if package in _SILENT or line in lines:
        return
    lines.add(line)
    warnings.warn(
        f"the parameters of this {type(model).__name__} are listed without its {count} dedicated ones, "
        "which are hidden from DeepSpeed. All of them: dmuon.zero.named_parameters(engine). Whole weights, for an "
        "average of them for instance: dmuon.zero.full_fp32_param(engine, name).",
        stacklevel=level,
    )


class Shown:
    """Dedicated parameters of stage 3 inside ``deepspeed.zero.GatheredParameters``: whole on every rank."""

    def __init__(self, params: list, modifier_rank: int | None):
        self._params, self._modifier_rank = params, modifier_rank
        self._kept: list[tuple] = []

    def enter(self) -> None:
        for param in self._params:
            parameter = param.parameter
            whole = _whole(param)
            self._kept.append((param, parameter.data, whole.data_ptr()))
            parameter.data = whole

    def leave(self) -> None:
        """Values of the rank that was to change them go to the owners."""
        for param, placeholder, shown in self._kept:
            value = param.parameter.data
            if value.data_ptr() != shown:  # a forward has put it back
                continue
            param.parameter.data = placeholder
            if self._modifier_rank is not None:
                self._take(param, value)
        self._kept = []

    def _take(self, param, value: torch.Tensor) -> None:
        value = value.contiguous()
        dist.broadcast(value, src=self._modifier_rank, group=param.runtime.job_group)
        if not torch.equal(value, _whole(param)):  # masters may have more bits
            param.runtime.set_value(param, value)


def _whole(param) -> torch.Tensor:
    return from_owner(param, param._owned_data).to(param.parameter.dtype)


def patch_gathered(kind) -> None:
    """``kind``: the class ``deepspeed.zero.GatheredParameters``. Idempotent."""
    if hasattr(kind.__init__, "_dmuon"):
        return
    init, enter, leave = kind.__init__, kind.__enter__, kind.__exit__

    @functools.wraps(init)
    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        self._dmuon = Shown(_hidden(params) if enabled else [], modifier_rank)
        init(self, params, modifier_rank, fwd_module, enabled)

    @functools.wraps(enter)
    def __enter__(self):
        result = enter(self)
        self._dmuon.enter()
        return result

    @functools.wraps(leave)
    def __exit__(self, *exc):
        self._dmuon.leave()
        return leave(self, *exc)

    __init__._dmuon = True
    kind.__init__, kind.__enter__, kind.__exit__ = __init__, __enter__, __exit__


def unpatch_gathered(kind) -> None:
    if hasattr(kind.__init__, "_dmuon"):
        for name in ("__init__", "__enter__", "__exit__"):
            setattr(kind, name, getattr(kind, name).__wrapped__)


def _hidden(params: list) -> list:
    """The dedicated ones of stage 3, in the order of the plan."""
    found = {id(p): dedicated_of(p) for p in params}
    mine = [p for p in found.values() if p is not None and not p.resident]
    return sorted(mine, key=lambda p: p.index)

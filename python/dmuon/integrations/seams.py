"""The methods of other packages' classes that dmuon wraps, and what it needs of them to be as it knows them."""

import functools
import inspect
import os
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dmuon import _C
from dmuon.optimizer import Muon
from dmuon.runtime import Runtime, runtime_of
from dmuon.when_imported import forget, when_imported

TESTED = {"accelerate": "1.15", "transformers": "5.24"}
_MODULES = {
    "accelerate.accelerator": "Accelerator",
    "transformers.trainer": "Trainer",
    "transformers.modeling_utils": "PreTrainedModel",
}

# (class, method) -> the original, of everything that is wrapped.
_originals: dict[tuple[type, str], Callable] = {}
# Methods that are not there, or that nobody calls any more.
_lost: dict[tuple[type, str], str] = {}


def install() -> None:
    """Now for what is imported already, else as soon as it is. Idempotent."""
    for name, has in _MODULES.items():
        when_imported(name, _patch, has=has)


def uninstall() -> None:
    for name in _MODULES:
        forget(name)
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    _lost.clear()


def _patch(module) -> None:
    from dmuon.integrations import accelerate, hf

    name = _MODULES[module.__name__]
    methods = {
        "Accelerator": (accelerate.PUBLIC, {}),
        "Trainer": (hf.PUBLIC, hf.PRIVATE),
        "PreTrainedModel": (hf.OF_MODELS, {}),
    }
    wrap(getattr(module, name), *methods[name])


def wrap(owner: type, public: dict[str, Callable], private: dict[str, Callable]) -> None:
    """``owner.name(...)`` becomes ``replacement(original, self, ...)``. Idempotent. Of what is private it is
    noted where it is not there, or where no other method of ``owner`` calls it."""
    for name, replacement in {**public, **private}.items():
        if (owner, name) in _originals:
            continue
        original = vars(owner).get(name)
        if original is None or (name in private and not _is_called(owner, name)):
            _lost[owner, name] = "does not have" if original is None else "does not call"
            continue
        _originals[owner, name] = original
        setattr(owner, name, _method(original, replacement))


def _is_called(owner: type, name: str) -> bool:
    others = (f for key, f in vars(owner).items() if key != name and inspect.isfunction(f))
    return any(name in inspect.unwrap(f).__code__.co_names for f in others)


def _method(original: Callable, replacement: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        return replacement(original, self, *args, **kwargs)

    return method


def original(owner: type, name: str) -> Callable:
    return _originals.get((owner, name)) or getattr(owner, name)


def check() -> None:
    """Raises RuntimeError where a package is not as dmuon needs it. Local; the same on every rank."""
    for (owner, name), what in _lost.items():
        package = owner.__module__.partition(".")[0]
        raise RuntimeError(
            f"dmuon relies on {owner.__name__}.{name}, which {package} {version(package)} {what}; tested: "
            f"{package} {TESTED[package]}. Install that version, or train with a loop of your own."
        )


def say_cpu(mesh: DeviceMesh) -> None:
    """On a machine without accelerators Accelerate takes each rank for a program of its own, unless it is told
    that CPUs are meant."""
    if mesh.device_type == "cpu" and mesh.size() > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def runtime_here(model) -> Runtime | None:
    """Of a model that FSDP2 or DDP runs; None for any other, DeepSpeed's too."""
    runtime = runtime_of(model, optional=True) if isinstance(model, nn.Module) else None
    return None if runtime is None or isinstance(runtime.adapter, _C.ZeroAdapter) else runtime


def muon_of(optimizer) -> Muon | None:
    """Behind wrappers."""
    while not isinstance(optimizer, Muon) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, Muon) else None


def check_sharded(model: nn.Module, runtime: Runtime) -> None:
    """Raises ValueError where nobody reduces the gradients of what was not dedicated."""
    rest = any(p.requires_grad for p in model.parameters() if not is_dedicated(p))
    sharded = runtime.resident or any(isinstance(m, FSDPModule) for m in model.modules())
    if rest and not sharded:
        raise ValueError(
            f"this {type(model).__name__} was given to dedicate_params and not to fully_shard, so that nobody "
            "would reduce the gradients of its other parameters. Call fully_shard on its layers and on it, "
            "then make dmuon.Muon."
        )


def is_dedicated(p) -> bool:
    return hasattr(p, "_dedicated_owner_rank")

"""What dmuon takes hold of in torchtitan: every name of it that it relies on is here."""

import functools
import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh

from dmuon.control import clip_dedicated
from dmuon.full_state import gather_owned
from dmuon.runtime import Runtime

TESTED = "0.3.0"


def missing(what: str) -> ImportError:
    """For a torchtitan that is built another way."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        return ImportError(
            f"dmuon.integrations.torchtitan needs torchtitan; it was tested with {TESTED}: "
            f"pip install torchtitan=={TESTED}"
        )
    other = "Install that version"
    if found == TESTED:
        other = (
            f"This one is damaged, or changed: pip install --force-reinstall torchtitan=={TESTED}"
        )
    return ImportError(
        f"torchtitan {found} has no {what}, which dmuon.integrations.torchtitan takes hold of; it was tested "
        f"with torchtitan {TESTED}. {other}; or call dmuon.dedicate_params by hand before parallelize."
    )


def _find(module: str, name: str, *attributes: str):
    """``name`` of ``module``, which has ``attributes``."""
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "?"):
            raise  # a package that torchtitan needs
        raise missing(module) from error
    except AttributeError as error:
        raise missing(f"{module}.{name}") from error
    for attribute in attributes:
        if not hasattr(found, attribute) and attribute not in _fields(found):
            raise missing(f"{module}.{name}.{attribute}")
    return found


def _fields(cls) -> dict:
    return getattr(cls, "__dataclass_fields__", {})


ModelSpec = _find(
    "torchtitan.protocols.model_spec",
    "ModelSpec",
    "parallelize_fn",
    "post_optimizer_build_fn",
    "state_dict_adapter",
)
OptimizersContainer = _find(
    "torchtitan.components.optimizer",
    "OptimizersContainer",
    "Config",
    "_log_optimizer",
    "_post_init",
    "_validate_params",
)
_find("torchtitan.distributed", "ParallelDims", "get_optional_mesh", "get_mesh", "spmd_backend")


def install() -> None:
    """torchtitan's ``clip_grad_norm_`` counts dedicated gradients. Idempotent."""
    utils = importlib.import_module("torchtitan.distributed.utils")
    original = _find(utils.__name__, "clip_grad_norm_")
    if not hasattr(original, "counts_dedicated"):
        utils.clip_grad_norm_ = _with_dedicated(original)


def _with_dedicated(original):
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, *args, **kwargs
    ):
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        norm = clip_dedicated(given, max_norm, norm_type, error_if_nonfinite)
        if norm is None:
            return original(given, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)
        return norm

    clip_grad_norm_.counts_dedicated = True
    return clip_grad_norm_


def after_call(model: nn.Module, name: str, then: Callable[[], None]) -> None:
    """``then`` runs when the method ``name`` of this one model has run, once."""
    method = getattr(model, name, None)
    if method is None:
        raise missing(f"Module.{name}")

    @functools.wraps(method)
    def method_and_then(*args, **kwargs):
        del model.__dict__[name]
        result = method(*args, **kwargs)
        then()
        return result

    model.__dict__[name] = method_and_then


def hook_checkpoint_wrappers(runtime: Runtime) -> None:
    """Activation checkpointing has wrapped blocks, and compilation takes the wrapper's call as one graph."""
    wrappers = {
        id(m._checkpoint_wrapped_module): m
        for m in runtime.model().modules()
        if isinstance(m, CheckpointWrapper)
    }
    for boundary in runtime.boundary_hooks:
        wrapper = wrappers.get(id(boundary.module()))
        if wrapper is not None:
            boundary.move_to(wrapper)


def shard_mesh(parallel_dims) -> DeviceMesh:
    """The slice over which torchtitan's ``fully_shard`` cuts, also where it has one rank."""
    name = "fsdp" if parallel_dims.spmd_backend == "partial_dtensor" else "dp_shard"
    return parallel_dims.get_mesh(name)


def refuse(parallel_dims, *, training, parallelism, **_) -> None:
    """Raises ValueError for what dmuon does not train under torchtitan, by the name of the setting."""
    backend = parallel_dims.spmd_backend
    for degree, setting in (
        (parallel_dims.pp, "parallelism.pipeline_parallel_degree"),
        (parallel_dims.cp, "parallelism.context_parallel_degree"),
        (parallel_dims.ep, "parallelism.expert_parallel_degree"),
    ):
        if degree > 1:
            raise ValueError(f"{setting} is {degree}; {_UNDER} train with 1. Set it to 1.")
    if backend == "full_dtensor" or (backend != "partial_dtensor" and parallel_dims.tp > 1):
        raise ValueError(
            f"parallelism.spmd_backend is {backend!r} with tensor_parallel_degree {parallel_dims.tp}; "
            f"{_UNDER} take tensor parallelism from DTensors over its axis alone. Set "
            "parallelism.spmd_backend to 'partial_dtensor'."
        )
    if training.dtype != "float32":
        raise ValueError(
            f"training.dtype is {training.dtype!r}; masters of dedicated weights are float32, and a checkpoint in "
            "torchtitan's format would lose their digits. Set it to 'float32'; mixed_precision_param may stay "
            "'bfloat16'."
        )
    if not training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs is False; the communication of dedicated weights cannot be "
            "captured. Set it to True."
        )
    if training.enable_cpu_offload:
        raise ValueError(
            "training.enable_cpu_offload is True; dedicated weights stay on their device. Set it to False."
        )


_UNDER = "dedicated parameters under torchtitan"


def gathering(adapter: type | None) -> type | None:
    """A ``state_dict_adapter`` whose ``to_hf`` gets whole weights: it cuts and turns them."""
    if adapter is None:
        return None

    class Gathering(adapter):
        @torch.no_grad()
        def to_hf(self, state_dict: dict) -> dict:
            return super().to_hf({**state_dict, **gather_owned(state_dict)})

    return functools.update_wrapper(Gathering, adapter, updated=())

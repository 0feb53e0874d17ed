"""All that dmuon touches of DeepSpeed beyond its public functions: here, in ``norms.py`` (how it clips and
skips steps) and in ``partitions.py`` (where it keeps float32 weights and states).

Tried with DeepSpeed 0.19.8. Each wrapped method is looked for, with its parameters, when an engine is
attached: another DeepSpeed is tried and announced, one whose methods have changed is refused by name.
"""

import contextlib
import functools
import inspect
import sys
import warnings
import weakref

import torch
from torch import nn

from dmuon.errors import listed

TESTED = ("0.19.8",)
_announced: set[str] = set()
_initialized: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_initializing = 0


def accelerator_name() -> str:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name().partition(":")[0]


def accelerator_device() -> torch.device:
    """Where DeepSpeed will want the model on this rank."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def is_partitioned(parameter: torch.Tensor) -> bool:
    """By ``deepspeed.zero.Init``, or by stage 3."""
    return hasattr(parameter, "ds_id")


def gathered(parameter: torch.Tensor) -> nn.Parameter:
    """An ordinary parameter with the values of a partitioned one. Collective."""
    return nn.Parameter(whole(parameter), requires_grad=parameter.requires_grad)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of the values of DeepSpeed's parameter. Collective where it is partitioned."""
    if not is_partitioned(parameter):
        return parameter.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


@torch.no_grad()
def assign(mine: torch.Tensor, value: torch.Tensor) -> None:
    """A whole value into a parameter or buffer that computes. Collective where it is partitioned."""
    if not is_partitioned(mine):
        mine.data.copy_(value)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([mine], modifier_rank=0):
        mine.data.copy_(value)


def is_engine(model) -> bool:
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def note_initialized(model) -> None:
    """It went through ``deepspeed.initialize`` without dedicated matrices."""
    if isinstance(model, nn.Module):
        _initialized.add(model)


def check_untouched(model: nn.Module) -> None:
    """Raises ValueError where ``deepspeed.initialize`` has had the model. Needs no DeepSpeed."""
    if is_engine(model):
        raise ValueError(
            "the model is a DeepSpeed engine already. Call dedicate_params_zero on the bare model, then "
            "deepspeed.initialize; or dmuon.zero.initialize, which does both."
        )
    managed = managed_by_deepspeed(model)
    if managed or model in _initialized:
        raise ValueError(
            f"{listed(managed) or 'the model'} went through deepspeed.initialize already. For DeepSpeed call "
            "dedicate_params_zero before it, or dmuon.zero.initialize instead of it."
        )


def is_pipeline(model) -> bool:
    from deepspeed import PipelineModule

    return isinstance(model, PipelineModule)


def managed_by_deepspeed(model: nn.Module) -> list[str]:
    """Names of parameters that an optimizer of DeepSpeed's holds."""
    marks = ("_z3_optimizer", "_hp_mapping")
    return [n for n, p in model.named_parameters() if any(hasattr(p, mark) for mark in marks)]


# deepspeed.initialize in progress: its wrappers of 16-bit optimizers step once in their constructors.


@contextlib.contextmanager
def initializing():
    global _initializing
    _initializing += 1
    try:
        yield
    finally:
        _initializing -= 1


def require_initializing() -> None:
    if not _initializing:
        raise RuntimeError(
            "OwnerOptimizer.step() before dmuon.zero.attach(engine, plan): the dedicated matrices would not "
            "be trained. Call attach right after deepspeed.initialize, or use dmuon.zero.initialize, which "
            "does both. (Import dmuon before `from deepspeed import initialize`.)"
        )


# The engine.


def reduces_now(engine) -> bool:
    """Whether DeepSpeed would reduce what the backward pass that begins brings."""
    if engine.inside_no_sync_ctxt or not engine.enable_backward_allreduce:
        return False
    if engine.zero_optimization_stage() >= 2:
        return True
    return engine.is_gradient_accumulation_boundary()


def compute_dtype(engine) -> torch.dtype | None:
    """What it casts parameters to; None where it leaves them as they are."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else None


def loss_scale(engine) -> float:
    """What the gradients that have come are multiplied by. Before an update of the scale."""
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    if config is not None:
        return float(config.cur_scale)
    return float(getattr(optimizer, "loss_scale", 1.0))


def leave_step(engine) -> None:
    """After an exception inside it, which DeepSpeed would take for a step in progress for ever."""
    engine._running_engine_step = False


def need_deepspeed():
    """The package. Raises ImportError with what to install where it is not there. Local."""
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise  # a package that DeepSpeed needs
        raise ImportError(
            f"dmuon.zero needs deepspeed; it was tested with {TESTED[-1]}: pip install deepspeed=={TESTED[-1]}"
        ) from error
    return deepspeed


def announce_version() -> None:
    import deepspeed

    version = deepspeed.__version__.partition("+")[0]
    if version in TESTED or version in _announced:
        return
    _announced.add(version)
    warnings.warn(
        f"dmuon was tried with DeepSpeed {', '.join(TESTED)}; this is {version}. What dmuon relies on is there, "
        "so it goes on.",
        stacklevel=4,
    )


def wrap(owner, name: str, wanted: str, make) -> None:
    """``owner.name`` becomes ``make(original)``, on this object alone.

    Args:
        wanted: the parameters that the method must have.

    Raises:
        RuntimeError: it is missing, or has others.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        refuse(owner, name, f"({wanted})", "is missing")
    given = ", ".join(_parameters(original))
    if given != wanted:
        refuse(owner, name, f"({wanted})", f"takes ({given})")
    setattr(owner, name, functools.wraps(original)(make(original)))


def _parameters(method) -> list[str]:
    """Without self; also of a method behind DeepSpeed's profiling decorator, which hides them."""
    function = getattr(method, "__func__", method)
    for cell in getattr(function, "__closure__", None) or ():
        if inspect.isfunction(cell.cell_contents) and function.__name__ == "wrapped_fn":
            function = cell.cell_contents
    bound = function is not method
    return list(inspect.signature(function).parameters)[bound:]


def refuse(owner, name: str, wanted: str, problem: str):
    import deepspeed

    raise RuntimeError(
        f"DeepSpeed {deepspeed.__version__}: {type(owner).__name__}.{name}{wanted} {problem}. dmuon relies on "
        f"it to clip, skip steps and keep states as DeepSpeed does. Use DeepSpeed {TESTED[-1]}."
    )

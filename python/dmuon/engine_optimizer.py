"""The engine's optimizer of the dedicated matrices, made from what users write."""

from collections.abc import Callable

from dmuon import _C
from dmuon.errors import choice
from dmuon.newton_schulz import as_newton_schulz
from dmuon.param_groups import check_settings

_NONFINITE = {
    "raise": _C.Nonfinite.raise_,
    "skip": _C.Nonfinite.skip,
    "propagate": _C.Nonfinite.propagate,
}
ADJUST_LR = ("match_rms_adamw", "original", "spectral_unclamped")


def engine_optimizer(
    runtime,
    *,
    ns_backend,
    ns_steps: int,
    nesterov: bool,
    replicate_async: bool | None,
    adjust_lr: str,
    adjust_lr_fn: str | None,
    nonfinite: str,
    sharded_gram: str = "never",
) -> tuple[Callable, dict]:
    """The engine's optimizer of the dedicated matrices, for any front end. Local.

    Returns:
        A function that makes it and gives it with its Newton-Schulz options, and the settings that must be
        equal on all ranks.

    Raises:
        ValueError: a setting out of range.
    """
    rule, options = check_options(ns_backend, ns_steps, adjust_lr, adjust_lr_fn, nonfinite)
    publish_async = runtime.axes.sizes[2] == 1 if replicate_async is None else bool(replicate_async)

    def build():
        muon = _C.Optimizer(
            engine=runtime.engine,
            newton_schulz=options,
            adjust_lr=getattr(_C.AdjustLr, rule),
            nesterov=bool(nesterov),
            nonfinite=_NONFINITE[nonfinite],
            sharded_gram=getattr(_C.ShardedGram, sharded_gram),
            publish_async=publish_async,
            groups=[0] * len(runtime.params),
        )
        return muon, options

    return build, {
        "ns_backend": ns_backend,
        "ns_steps": ns_steps,
        "adjust_lr": rule,
        "nesterov": nesterov,
        "nonfinite": nonfinite,
        "replicate_async": publish_async,
    }


def check_options(ns_backend, ns_steps, adjust_lr, adjust_lr_fn, nonfinite):
    """The rule of adjust_lr and the Newton-Schulz options. Raises ValueError for a setting out of range. Local."""
    choice("nonfinite", nonfinite, tuple(_NONFINITE))
    return _adjust_lr(adjust_lr, adjust_lr_fn), as_newton_schulz(ns_backend).options(ns_steps)


def optimizer_of(runtime, given):
    """The optimizer that trains the dedicated matrices of a model.

    Args:
        given: what the user takes for it; under DeepSpeed any optimizer of the engine's will do.

    Raises:
        ValueError: it is another one.
    """
    mine = runtime.optimizer()
    if isinstance(runtime.adapter, _C.ZeroAdapter):
        if mine is None:
            raise ValueError(
                "this model has no DeepSpeed engine yet. Call deepspeed.initialize first."
            )
        return mine
    if mine is not given or mine is None:
        raise ValueError(
            f"optimizer is a {type(given).__name__}; it must be the dmuon.Muon of this model."
        )
    return mine


def _adjust_lr(adjust_lr: str, adjust_lr_fn: str | None) -> str:
    if adjust_lr_fn is not None and adjust_lr not in (ADJUST_LR[0], adjust_lr_fn):
        raise ValueError(
            f"adjust_lr is {adjust_lr!r} and adjust_lr_fn {adjust_lr_fn!r}; they are two names of one "
            "setting. Give one."
        )
    rule = adjust_lr_fn or adjust_lr
    choice("adjust_lr", rule, ADJUST_LR)
    return rule


def group_settings(group: dict) -> "_C.GroupSettings":
    """One group as the engine reads it, checked anew: schedulers and users write into it."""
    keys = ("momentum",) if group["route"] == "muon" else ("betas", "eps")
    settings = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"]}
    settings |= {key: group[key] for key in keys}
    check_settings(group["group_name"], settings)
    return _C.GroupSettings(**settings)

"""``deepspeed.initialize`` with dedicated matrices, from a config alone."""

import functools
import inspect
import sys
import warnings

import torch
from torch import nn

from dmuon.agreement import together
from dmuon.errors import listed
from dmuon.groups import world_control_group
from dmuon.runtime import runtime_of
from dmuon.when_imported import forget, when_imported
from dmuon.zero import public, seams
from dmuon.zero.attach import attach
from dmuon.zero.config import OPTIMIZER, DsConfig, require_group
from dmuon.zero.groups import check_keywords, groups_given
from dmuon.zero.optimizer import OwnerOptimizer
from dmuon.zero.plan import Plan, dedicate_params_zero
from dmuon.zero.refusals import check_supported
from dmuon.zero.section import Section


def initialize(*args, **kwargs):
    """``deepspeed.initialize``, with its arguments and its four results: engine, optimizer, loader, scheduler.

    Where the config names the optimizer ``DMuon``, the matrices that its ``"dmuon"`` section selects get owners
    (``dedicate_params_zero``), DeepSpeed gets the rest with an ``OwnerOptimizer``, and the two are attached.
    Else it is DeepSpeed's own.

    Collective over all ranks.

    Raises:
        ValueError: with the same text on every rank, before DeepSpeed has begun: what
            ``dedicate_params_zero`` refuses; an unknown key, with the nearest known one; no ``"dmuon"``
            section, with one to paste.
        ImportError: DeepSpeed is not installed.
    """
    return _initialize(_original(seams.need_deepspeed()), *args, **kwargs)


def _original(deepspeed):
    return inspect.unwrap(deepspeed.initialize, stop=lambda f: not getattr(f, "_dmuon", False))


def _initialize(original, *args, **kwargs):
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    config = _config_of(arguments)
    model, optimizer = arguments["model"], arguments["optimizer"]
    plan = _plan_of(model)
    if not _concerns_us(config, optimizer, plan):
        result = original(*args, **kwargs)
        seams.note_initialized(model)
        return result
    ds = DsConfig.read(config)
    if plan is None and optimizer is None and ds.is_inference:
        warnings.warn(
            'the DeepSpeed config has a "dmuon" section and no optimizer: this engine evaluates, it cannot train.',
            stacklevel=3,
        )
        return original(*args, **kwargs)
    return _with_owners(original, call, ds, plan)


def _with_owners(original, call, ds: DsConfig, plan: Plan | None):
    arguments = call.arguments
    model, optimizer = arguments["model"], arguments["optimizer"]
    if arguments["model_parameters"] is not None:
        arguments["model_parameters"] = groups_given(arguments["model_parameters"])
    _init_distributed(arguments)
    require_group()
    together(world_control_group(), lambda: _check_all(ds, optimizer, plan, arguments))
    if plan is None:
        plan = dedicate_params_zero(model, ds.raw)
        plan.made_by_initialize = True
    if not isinstance(optimizer, OwnerOptimizer):
        given = arguments["model_parameters"]
        params = model.parameters() if given is None else given
        arguments["optimizer"] = optimizer = OwnerOptimizer(
            params, plan=plan, **ds.optimizer_params()
        )
    arguments["model_parameters"] = None
    arguments["config"], arguments["config_params"] = _for_deepspeed(ds), None
    with seams.initializing():
        result = original(*call.args, **call.kwargs)
    if plan.made_by_initialize:
        attach(result[0], plan)
    return result


def _check_listed(ds: DsConfig, model: nn.Module, groups: list[dict]) -> None:
    """Raises ValueError where ``model_parameters`` leaves out a matrix that the config selects: it would be
    trained all the same. What ``zero.Init`` has partitioned is another object by then, and cannot be told."""
    params = [p for group in groups for p in group["params"]]
    if any(seams.is_partitioned(p) for p in params):
        return
    ids, section = {id(p) for p in params}, Section.read(ds, model)
    left_out = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in ids and section.predicate(name, p)
    ]
    if left_out:
        raise ValueError(
            f'"dmuon" selects {listed(left_out)}, and model_parameters leaves them out. List them, or exclude '
            "them in the config."
        )


def _config_of(arguments):
    """As DeepSpeed looks for it."""
    config = arguments["config"] if arguments["config"] is not None else arguments["config_params"]
    if config is None:
        config = getattr(arguments["args"], "deepspeed_config", None)
    return config


def _plan_of(model) -> Plan | None:
    runtime = runtime_of(model, optional=True) if isinstance(model, nn.Module) else None
    return getattr(runtime.front, "plan", None) if runtime is not None else None


def _concerns_us(config, optimizer, plan) -> bool:
    if plan is not None or isinstance(optimizer, OwnerOptimizer):
        return True
    try:
        ds = DsConfig.read(config)
    except ValueError:
        return False  # DeepSpeed's to say
    return ds.names_dmuon or "dmuon" in ds.raw


def _check_all(ds: DsConfig, optimizer, plan: Plan | None, arguments) -> None:
    """Before anything has changed."""
    _check_call(ds, optimizer, arguments)
    if isinstance(optimizer, OwnerOptimizer) and optimizer.plan is not plan:
        raise ValueError(
            "the OwnerOptimizer was made from the plan of another model. Give deepspeed.initialize the model that "
            "dedicate_params_zero got."
        )
    ds.check()
    check_supported(ds)
    if optimizer is None:
        check_keywords(ds.optimizer_params())
    if plan is not None:
        _check_again(ds, plan)
    elif arguments["model_parameters"] is not None:
        _check_listed(ds, arguments["model"], arguments["model_parameters"])


def _check_again(ds: DsConfig, plan: Plan) -> None:
    """A second call for one model is right where DeepSpeed failed in the first one."""
    other = plan.made_by_initialize and ds.lines() != plan.config.lines()
    if plan.attached is not None or other:
        raise ValueError(
            "this model was given to deepspeed.initialize before: an engine trains it already, and keeps its "
            "dedicated matrices. Build the model again for another config or another engine (a Trainer, an "
            "Accelerator), and load the weights into it."
        )
    if plan.made_by_initialize:
        plan.optimizer = lambda: None


def _check_call(ds: DsConfig, optimizer, arguments) -> None:
    """Raises ValueError where the dedicated matrices would be left untrained."""
    if optimizer is None and not ds.names_dmuon:
        kind = ds.get("optimizer", "type")
        raise ValueError(
            f"the optimizer of this config is {kind!r}, which knows nothing of dedicated matrices. Write "
            f'"optimizer": {{"type": "{OPTIMIZER}", "params": {{...}}}}, or drop the "dmuon" section.'
        )
    if optimizer is not None and not isinstance(optimizer, OwnerOptimizer):
        kind = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise ValueError(
            f"deepspeed.initialize got the optimizer {kind}, which knows nothing of dedicated matrices. Leave it "
            f'out and name "{OPTIMIZER}" in the config, or give OwnerOptimizer(params, plan=plan).'
        )
    if arguments["mpu"] is not None:
        raise ValueError(
            "mpu: model parallelism is not supported together with dedicated matrices."
        )
    if not isinstance(arguments["model"], nn.Module):
        raise ValueError(
            f"model is a {type(arguments['model']).__name__}; it must be a torch.nn.Module."
        )


def _init_distributed(arguments) -> None:
    """As deepspeed.initialize does a moment later."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if not torch.distributed.is_initialized() and arguments["dist_init_required"] is not False:
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=arguments["distributed_port"],
        )


def _for_deepspeed(ds: DsConfig) -> dict:
    """A client optimizer of a class that DeepSpeed has not tested, also with offloading."""
    raw = {**ds.raw, "zero_allow_untested_optimizer": True}
    if ds.get("zero_optimization", "offload_optimizer") is not None:
        raw["zero_force_ds_cpu_optimizer"] = False
    return raw


def patch(deepspeed) -> None:
    """``deepspeed.initialize`` reads what concerns us; ``torch.optim.DMuon`` says what to do where it was not
    asked. Idempotent."""
    if getattr(deepspeed.initialize, "_dmuon", False):
        return
    original = deepspeed.initialize

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return _initialize(original, *args, **kwargs)

    wrapped._dmuon = True
    deepspeed.initialize = wrapped
    torch.optim.DMuon = _unreached
    public.patch_gathered(deepspeed.zero.GatheredParameters)


def unpatch() -> None:
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and getattr(deepspeed.initialize, "_dmuon", False):
        deepspeed.initialize = deepspeed.initialize.__wrapped__
        public.unpatch_gathered(deepspeed.zero.GatheredParameters)
    public.uninstall()
    if getattr(torch.optim, "DMuon", None) is _unreached:
        del torch.optim.DMuon


def _unreached(params, **kwargs):
    """What DeepSpeed finds under the name ``DMuon`` when our wrapper has not been asked."""
    raise RuntimeError(
        f'the DeepSpeed config names the optimizer "{OPTIMIZER}", and this deepspeed.initialize was bound before '
        f"`import dmuon` ({listed(sorted(kwargs)) or 'no settings'} given). Call dmuon.zero.initialize(model=..., "
        "config=...), or import dmuon first."
    )


def install() -> None:
    """Now, if DeepSpeed is imported already; else as soon as it is."""
    when_imported("deepspeed", patch, has="initialize")


def uninstall() -> None:
    forget("deepspeed")
    unpatch()

"""torchtitan: Muon from its configs. torchtitan's Trainer, checkpoints and schedules stay as they are.

config.model_spec = dedicate(config.model_spec, predicate=lambda name, p: ...)
config.optimizer = DMuon(lr=0.02, adamw_lr=3e-4)
"""

import re
from dataclasses import dataclass, fields, replace

from torch import nn

from dmuon.dedicate import dedicate_params
from dmuon.errors import choice, listed
from dmuon.integrations import titan_seams as seams
from dmuon.names import clean
from dmuon.optimizer import Muon
from dmuon.runtime import runtime_of
from dmuon.set_up import Predicate

_OURS = ("mesh", "replicate_mesh", "reshard_after_forward", "independent_dims", "allow_empty")


def dedicate(spec: "seams.ModelSpec", predicate: Predicate, **options) -> "seams.ModelSpec":
    """A copy of a torchtitan ``ModelSpec`` whose model has dedicated parameters. Use it with ``DMuon``. Local; the
    ``parallelize_fn`` that it holds is collective.

    Its ``parallelize_fn`` calls ``dmuon.dedicate_params`` after tensor parallelism and before activation
    checkpointing, compilation and ``fully_shard``; the meshes are those of ``ParallelDims``. torchtitan's
    ``clip_grad_norm_`` counts dedicated gradients from here on.

    Args:
        spec: of the model, such as ``config.model_spec``.
        predicate: ``(name, parameter) -> bool``; names are torchtitan's, without wrappers:
            ``layers.0.attention.wo.weight``.
        options: further keywords of ``dmuon.dedicate_params``.

    Raises:
        TypeError: ``spec`` is no ``ModelSpec``.
        ValueError: it was dedicated before; an option that torchtitan's config decides.
    """
    if not isinstance(spec, seams.ModelSpec):
        raise TypeError(
            f"spec is a {type(spec).__name__}; dedicate takes torchtitan's ModelSpec: "
            "config.model_spec = dedicate(config.model_spec, predicate=...)."
        )
    if isinstance(spec.parallelize_fn, _Parallelize):
        raise ValueError("this ModelSpec was given to dedicate already. Call it once.")
    taken = [key for key in _OURS if key in options]
    if taken:
        raise ValueError(
            f"dedicate was given {listed(taken)}, which torchtitan's ParallelismConfig decides. Leave it out."
        )
    seams.install()
    return replace(
        spec,
        parallelize_fn=_Parallelize(spec.parallelize_fn, predicate, options),
        post_optimizer_build_fn=_AfterOptimizers(spec.post_optimizer_build_fn),
        state_dict_adapter=seams.gathering(spec.state_dict_adapter),
    )


class _Parallelize:
    """The spec's ``parallelize_fn``, which dedicates on its way."""

    def __init__(self, original, predicate: Predicate, options: dict):
        self._original, self._predicate, self._options = original, predicate, options

    def __call__(self, model: nn.Module, *, parallel_dims, **config):
        seams.refuse(parallel_dims, **config)
        parallelism = config["parallelism"]

        def dedicate_now() -> None:
            dedicate_params(
                model,
                seams.shard_mesh(parallel_dims),
                self._predicate,
                replicate_mesh=parallel_dims.get_optional_mesh("dp_replicate"),
                reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never",
                **self._options,
            )

        if parallel_dims.spmd_backend == "partial_dtensor" and parallel_dims.tp == 1:
            dedicate_now()  # nothing makes new parameters of these
        else:
            seams.after_call(model, "parallelize", dedicate_now)
        result = self._original(model, parallel_dims=parallel_dims, **config)
        runtime = runtime_of(model, optional=True)
        if runtime is None:
            raise seams.missing("Module.parallelize, called by parallelize_fn before fully_shard")
        seams.hook_checkpoint_wrappers(runtime)
        return result


class _AfterOptimizers:
    """The spec's ``post_optimizer_build_fn``; before it, whether the optimizer is ours."""

    def __init__(self, original):
        self._original = original

    def __call__(self, optimizers, model_parts, parallel_dims) -> None:
        if not isinstance(optimizers, DMuonContainer):
            raise ValueError(
                f"the ModelSpec was given to dmuon's dedicate, and the optimizer is a "
                f"{type(optimizers).__name__}, which would train placeholders. Set config.optimizer = "
                "DMuon(lr=..., adamw_lr=...), or leave dedicate out."
            )
        if self._original is not None:
            self._original(optimizers, model_parts, parallel_dims)


class DMuonContainer(seams.OptimizersContainer):
    """torchtitan's container with one ``dmuon.Muon`` in it, which trains the whole model. torchtitan makes it
    from ``DMuon(...)``. Collective, as ``dmuon.Muon`` is.

    Args:
        config: what ``DMuon(...)`` gives.
        model_parts: the model; one, since pipelines are refused.

    Raises:
        ValueError: on all ranks: the model was not given to ``dedicate``; a setting that dmuon cannot have.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(seams.OptimizersContainer.Config):
        """What goes into ``config.optimizer``. Local.

        Args:
            param_groups: torchtitan's ``ParamGroupConfig`` with ``optimizer_name="DMuon"``; ``optimizer_kwargs``
                are the keys of ``dmuon.Muon``'s groups (``muon_lr``, ``adamw_weight_decay``, ...). The first pattern
                that matches wins; parameters that none matches are trained with the settings here.
            implementation: of the AdamW part: ``"fused"``, ``"foreach"``, ``"for-loop"``.
            optimizer_factory_kwargs_by_name: refused: the keywords here are the settings.
            lr, momentum, weight_decay, ns_steps, ns_backend, nesterov, adjust_lr, nonfinite, replicate_async: as
                ``dmuon.Muon``'s.
            adamw_lr, adamw_betas, adamw_weight_decay, adamw_eps, tp_distributed_gram, tp_distributed_gram_policy: as
                ``dmuon.Muon``'s.
        """

        lr: float = 0.02
        momentum: float = 0.95
        weight_decay: float = 0.0
        ns_steps: int = 5
        adamw_lr: float = 1e-3
        adamw_betas: tuple[float, float] = (0.9, 0.999)
        adamw_weight_decay: float = 0.01
        adamw_eps: float = 1e-8
        ns_backend: str = "gram"
        nesterov: bool = True
        replicate_async: bool | None = None
        tp_distributed_gram: bool = False
        tp_distributed_gram_policy: str = "beneficial"
        adjust_lr: str = "match_rms_adamw"
        nonfinite: str = "raise"

    def __init__(self, config: "DMuonContainer.Config", *, model_parts: list[nn.Module]):
        _check(config, model_parts)
        self.model_parts = model_parts
        (model,) = model_parts
        muon = Muon(model, param_groups=_groups(config, model), **_keywords(config))
        self.optimizers = [muon]
        names = muon.parameter_names()
        for group in muon.param_groups:
            group["param_names"] = [names[id(p)] for p in group["params"]]
            if group["route"] == "adamw":
                group["fused"] = config.implementation == "fused"
                group["foreach"] = config.implementation == "foreach"
        muon.fill_state()  # torchtitan would run a step to get at it
        self._log_optimizer(muon, 0, [group["group_name"] for group in muon.param_groups])
        trained = [p for g in muon.param_groups for p in g["params"] if p.requires_grad]
        self._validate_params(trained)
        self._post_init(trained)


DMuon = DMuonContainer.Config

_OF_TITAN = {field.name for field in fields(seams.OptimizersContainer.Config)}


def _keywords(config: DMuon) -> dict:
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _OF_TITAN}


def _check(config: DMuon, model_parts: list[nn.Module]) -> None:
    if len(model_parts) != 1 or runtime_of(model_parts[0], optional=True) is None:
        raise ValueError(
            "the optimizer is DMuon, and no parameter of the model is dedicated. Set config.model_spec = "
            "dedicate(config.model_spec, predicate=...) before the Trainer is built. (With "
            "checkpoint.create_seed_checkpoint torchtitan leaves parallelize_fn out: make the seed checkpoint "
            "with its own optimizer.)"
        )
    choice("implementation", config.implementation, ("for-loop", "foreach", "fused"))
    if config.optimizer_factory_kwargs_by_name:
        raise ValueError(
            "optimizer_factory_kwargs_by_name is set; DMuon takes its settings as its own keywords. Leave it out."
        )
    for group in config.param_groups:
        if group.optimizer_name != "DMuon":
            raise ValueError(
                f"the param group {group.pattern!r} has optimizer_name {group.optimizer_name!r}; DMuon trains "
                "the whole model, what is not dedicated with AdamW. Write optimizer_name='DMuon', with "
                "muon_lr, adamw_lr, ... in optimizer_kwargs."
            )


def _groups(config: DMuon, model: nn.Module) -> list[dict] | None:
    """``param_groups`` of ``dmuon.Muon``; the first pattern that matches a name wins."""
    if not config.param_groups:
        return None
    left = {clean(name): p for name, p in model.named_parameters()}
    groups = []
    for given in config.param_groups:
        pattern = re.compile(given.pattern)
        names = [name for name in left if pattern.search(name)]
        if not names:
            raise ValueError(
                f"the pattern {given.pattern!r} of a param group matches no parameter that an earlier one "
                f"left. There are {listed(list(left))}."
            )
        params = [left.pop(name) for name in names]
        groups.append({"params": params, "group_name": given.pattern, **given.optimizer_kwargs})
    if left:
        groups.append({"params": list(left.values()), "group_name": "default"})
    return groups

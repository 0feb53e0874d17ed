"""A ds_config, read: what DeepSpeed is told, what is dmuon's, and what the two cannot do together."""

import copy
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn

from dmuon.boundaries import containers
from dmuon.errors import listed, nearest
from dmuon.names import clean, matches, slots
from dmuon.optimizer import Muon
from dmuon.policy import ROUTES
from dmuon.set_up import Settings

OPTIMIZER = "DMuon"
# Keywords of dmuon.Muon that mean nothing here: one group is one group of DeepSpeed's, and there is
# no tensor parallelism.
_NOT_HERE = ("self", "model", "param_groups", "tp_distributed_gram", "tp_distributed_gram_policy")
MUON_KEYS = tuple(k for k in signature(Muon.__init__).parameters if k not in _NOT_HERE)
# Keywords of dedicate_params that a JSON file cannot hold, or that need tensor parallelism.
_NOT_JSON = (
    "hook_boundary_predicate",
    "hook_boundary_resolver",
    "tp_buffer_reuse",
    "independent_dims",
    "allow_empty",
)
SETTINGS_KEYS = tuple(f.name for f in fields(Settings) if f.name not in _NOT_JSON)
_SELECTION = ("include", "exclude", "min_ndim", "routes")
_SWITCHES = ("hook_boundary_strict", "pack_small_params", "strict_init")
# What is read of DeepSpeed's own keys, by path.
_READ = (
    ("zero_optimization", "stage"),
    ("bf16", "enabled"),
    ("bfloat16", "enabled"),
    ("fp16", "enabled"),
    ("communication_data_type",),
    ("data_types", "grad_accum_dtype"),
    ("gradient_allreduce_op",),
)
_EQUAL = (
    *_READ,
    ("gradient_clipping",),
    ("gradient_accumulation_steps",),
    ("optimizer",),
    ("dmuon",),
)


@dataclass
class DsConfig:
    """What dmuon needs of a ds_config; ``raw`` is a copy of all of it."""

    raw: dict

    @staticmethod
    def read(config) -> "DsConfig":
        """``config``: a dictionary, or the path of a JSON file."""
        if isinstance(config, Mapping):
            return DsConfig(copy.deepcopy(dict(config)))
        if not isinstance(config, (str, os.PathLike)):
            raise ValueError(
                f"the DeepSpeed config is a {type(config).__name__}; it must be a dictionary or the "
                "path of a JSON file."
            )
        if not os.path.exists(config):
            raise ValueError(f"the DeepSpeed config {os.fspath(config)!r} does not exist.")
        with open(config) as file:
            try:
                return DsConfig(json.load(file))
            except json.JSONDecodeError as error:
                raise ValueError(f"{os.fspath(config)} is not JSON: {error}.") from error

    def get(self, *path, default=None):
        node = self.raw
        for key in path:
            node = node.get(key) if isinstance(node, Mapping) else None
        return default if node is None else node

    def on(self, *path) -> bool:
        return self.get(*path) in (True, "true", "True", 1)

    def check(self) -> None:
        """Raises ValueError where what dmuon reads is not what it can read."""
        for path in _READ:
            if self.get(*path) == "auto":
                raise ValueError(
                    f"{'.'.join(path)} of the DeepSpeed config is still 'auto', which HF Trainer and Accelerate "
                    "fill in before deepspeed.initialize. Give a value."
                )
        _ = self.stage, self.reduce_dtype
        if self.names_dmuon:
            self.optimizer_params()

    def lines(self) -> list[str]:
        """What must be equal on all ranks."""
        shown = ((path, self.get(*path)) for path in _EQUAL)
        return [f"{'.'.join(p)}\t{json.dumps(v, sort_keys=True, default=str)}" for p, v in shown]

    @property
    def stage(self) -> int:
        stage = self.get("zero_optimization", "stage", default=0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3.")
        return stage

    @property
    def names_dmuon(self) -> bool:
        return str(self.get("optimizer", "type", default="")).lower() == OPTIMIZER.lower()

    @property
    def is_inference(self) -> bool:
        """At stage 3 DeepSpeed takes a config without an optimizer to evaluate with."""
        return self.stage == 3 and self.get("optimizer") is None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What DeepSpeed casts parameters to; None where it leaves them as they are."""
        if self.on("bf16", "enabled") or self.on("bfloat16", "enabled"):
            return torch.bfloat16
        return torch.float16 if self.on("fp16", "enabled") else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients travel, where the config says so."""
        name = self.get("communication_data_type")
        if name is None and self.get("data_types", "grad_accum_dtype") in ("fp32", "float32"):
            name = "fp32"
        if name is None:
            return None
        dtypes = {
            "fp32": torch.float32,
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
            "bfp16": torch.bfloat16,
        }
        if name not in dtypes:
            raise ValueError(
                f"communication_data_type is {name!r}; it must be one of {', '.join(dtypes)}."
            )
        return dtypes[name]

    @property
    def sums_gradients(self) -> bool:
        return self.get("gradient_allreduce_op") == "sum"

    def optimizer_params(self) -> dict:
        """The keywords of ``OwnerOptimizer``, checked."""
        given = self.get("optimizer", "params", default={})
        if not isinstance(given, Mapping):
            raise ValueError(f"optimizer.params is {given!r}; it must be a section.")
        for key, value in given.items():
            if key not in MUON_KEYS:
                raise ValueError(f"optimizer.params has {key!r}, {nearest(key, MUON_KEYS)}")
            if value == "auto":
                raise ValueError(
                    f"optimizer.params.{key} is still 'auto', which HF Trainer fills in for lr and "
                    "weight_decay alone. Give a value."
                )
        return dict(given)


@dataclass
class Section:
    """The ``"dmuon"`` section: which matrices, and the keywords of ``dedicate_params``."""

    include: list[str]
    exclude: list[str] = field(default_factory=list)
    min_ndim: int = 2
    settings: Settings = field(default_factory=Settings)

    @staticmethod
    def read(config: DsConfig, model: nn.Module) -> "Section":
        given = config.get("dmuon")
        if given is None:
            raise ValueError(
                f'the DeepSpeed config has the optimizer "{OPTIMIZER}" and no "dmuon" section that says '
                f"which matrices it is for.{suggestion(model)}"
            )
        if not isinstance(given, Mapping):
            raise ValueError(f'"dmuon" is {given!r}; it must be a section, {{"include": [...]}}.')
        known = (*_SELECTION, *SETTINGS_KEYS)
        for key in given:
            if key not in known:
                raise ValueError(f'"dmuon" has {key!r}, {nearest(key, known)}')
        if "include" not in given:
            raise ValueError(f'"dmuon" has no "include".{suggestion(model)}')
        keywords = {key: value for key, value in given.items() if key in SETTINGS_KEYS}
        for key in _SWITCHES:
            if not isinstance(keywords.get(key, True), bool):
                raise ValueError(f'"dmuon".{key} is {keywords[key]!r}; it must be true or false.')
        keywords["param_policy"] = _with_routes(given.get("param_policy"), given.get("routes"))
        return Section(
            _globs("include", given["include"]),
            _globs("exclude", given.get("exclude", [])),
            _whole("min_ndim", given.get("min_ndim", 2)),
            Settings(**keywords),
        )

    def predicate(self, name: str, parameter: torch.Tensor) -> bool:
        if parameter.ndim < self.min_ndim or matches(name, self.exclude):
            return False
        return matches(name, self.include)

    def check_used(self, model: nn.Module) -> None:
        """Raises ValueError naming a pattern that matches no parameter."""
        names = [name for name, *_ in slots(model)]
        for key, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(matches(name, [pattern]) for name in names):
                    raise ValueError(
                        f'"dmuon".{key} has {pattern!r}, which matches no parameter of this model. '
                        f"Parameters are {listed(names)}.{suggestion(model)}"
                    )
        if not any(self.predicate(name, _Shaped(shape_of(p))) for name, _, _, p in slots(model)):
            raise ValueError(
                f'"dmuon" selects no parameter of this model: what "include" names has fewer than '
                f'{self.min_ndim} dims ("min_ndim"), or is in "exclude". Parameters are {listed(names)}.'
                f"{suggestion(model)}"
            )


@dataclass
class _Shaped:
    """A parameter as ``Section.predicate`` sees it."""

    shape: torch.Size

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _globs(key: str, value) -> list[str]:
    globs = [value] if isinstance(value, str) else value
    if not isinstance(globs, list) or not all(isinstance(g, str) for g in globs):
        raise ValueError(f'"dmuon".{key} is {value!r}; it must be a list of globs, ["*_proj"].')
    return globs


def _whole(key: str, value) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f'"dmuon".{key} is {value!r}; it must be a whole number of at least 1.')
    return value


def _with_routes(policy: Mapping | None, routes: Mapping | None) -> Mapping | None:
    """``{"adamw": ["*.router"]}`` as overrides of a ``param_policy``."""
    if routes is None:
        return policy
    if not isinstance(routes, Mapping):
        raise ValueError(f'"dmuon".routes is {routes!r}; it must be {{"adamw": ["*.router"]}}.')
    for route in routes:
        if route not in ROUTES:
            raise ValueError(f'"dmuon".routes has {route!r}, {nearest(route, ROUTES)}')
    policy = dict(policy or {})
    more = [
        {
            "name": [p for g in _globs("routes", globs) for p in (g, g + ".*")],
            "set": {"route": route},
        }
        for route, globs in routes.items()
    ]
    return {**policy, "overrides": [*(policy.get("overrides") or []), *more]}


def suggestion(model: nn.Module) -> str:
    """A section to paste for this model, with what it would select."""
    repeated = containers(model)
    inner = [
        name
        for name, module, _, p in slots(model)
        if len(shape_of(p)) >= 2
        and not isinstance(module, nn.Embedding)
        and any(name.startswith(path + ".") for path in repeated)
    ]
    globs = sorted({"*." + name.split(".")[-2] for name in inner if name.count(".") > 0})
    if not globs:
        return ' For instance: "dmuon": {"include": ["*_proj"]}.'
    chosen = [
        name for name, _, _, p in slots(model) if len(shape_of(p)) >= 2 and matches(name, globs)
    ]
    section = json.dumps({"include": globs})
    return f' For this model: "dmuon": {section}, which selects {listed(chosen, 4)}.'


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Also of one that zero.Init has partitioned."""
    return getattr(parameter, "ds_shape", parameter.shape)


@dataclass
class _Refusal:
    """What does not go with dedicated matrices."""

    what: str
    when: Callable[[DsConfig], bool]
    do: str


def _device_is(config: DsConfig, key: str, device: str) -> bool:
    return config.get("zero_optimization", key, "device") == device


def _on_cpu() -> bool:
    from dmuon.zero.seams import accelerator_name

    return accelerator_name() == "cpu"


_REFUSED = (
    _Refusal(
        'optimizer.type "Muon"',
        lambda c: str(c.get("optimizer", "type", default="")).lower() == "muon",
        'That is DeepSpeed\'s own Muon. Write "type": "DMuon", or drop the "dmuon" section.',
    ),
    _Refusal(
        "fp16 at stage 0",
        lambda c: c.stage == 0 and c.on("fp16", "enabled"),
        "There DeepSpeed divides gradients by a loss scale that it has not multiplied into the loss. "
        "Use stage 1, or bf16.",
    ),
    _Refusal(
        "zero_optimization.contiguous_gradients: false on a CPU",
        lambda c: (
            c.stage in (1, 2)
            and c.get("zero_optimization", "contiguous_gradients") is False
            and _on_cpu()
        ),
        "There DeepSpeed leaves out the reduction of its own gradients without a word. Drop the key.",
    ),
    _Refusal(
        "gradient_predivide_factor at stage 3",
        lambda c: c.stage == 3 and c.get("gradient_predivide_factor", default=1) != 1,
        "There DeepSpeed divides its own gradients by it and does not multiply them back. Drop the key.",
    ),
    _Refusal("sparse_gradients", lambda c: c.on("sparse_gradients"), "Drop the key."),
    _Refusal("amp", lambda c: c.on("amp", "enabled"), "Use bf16."),
    _Refusal(
        "torch_autocast in float16",
        lambda c: (
            c.on("torch_autocast", "enabled")
            and c.get("torch_autocast", "dtype") in ("float16", "fp16", "torch.float16", "half")
        ),
        "Its GradScaler does not see dedicated gradients. Use bfloat16.",
    ),
    _Refusal(
        "zero_optimization.offload_optimizer to NVMe",
        lambda c: _device_is(c, "offload_optimizer", "nvme"),
        'Use "device": "cpu".',
    ),
    _Refusal(
        "zero_optimization.offload_param to NVMe",
        lambda c: _device_is(c, "offload_param", "nvme"),
        'Use "device": "cpu".',
    ),
    _Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        lambda c: c.on("zero_optimization", "offload_optimizer", "super_offload"),
        "Drop the key.",
    ),
    _Refusal(
        "zero_optimization.zenflow",
        lambda c: c.get("zero_optimization", "zenflow") is not None,
        "Drop the section.",
    ),
    _Refusal(
        "zero_optimization.elastic_checkpoint",
        lambda c: c.on("zero_optimization", "elastic_checkpoint"),
        "Drop the key: dedicated matrices load at any world size without it.",
    ),
    _Refusal(
        "zero_optimization.mics_shard_size",
        lambda c: (c.get("zero_optimization", "mics_shard_size") or -1) > 0,
        "Use zero_hpz_partition_size.",
    ),
    _Refusal("compile.deepcompile", lambda c: c.on("compile", "deepcompile"), "Drop the section."),
    _Refusal("hybrid_engine", lambda c: c.on("hybrid_engine", "enabled"), "Drop the section."),
    _Refusal("eigenvalue", lambda c: c.on("eigenvalue", "enabled"), "Drop the section."),
    _Refusal(
        "quantize_training", lambda c: c.on("quantize_training", "enabled"), "Drop the section."
    ),
    _Refusal(
        "tensor_parallel",
        lambda c: (c.get("tensor_parallel", "autotp_size") or 0) > 1,
        "Tensor parallelism is not supported under ZeRO; use dedicate_params or replicate_tp.",
    ),
    _Refusal(
        "sequence parallelism",
        lambda c: (c.get("sequence_parallel_size") or 1) > 1,
        "Set sequence_parallel_size to 1.",
    ),
    _Refusal(
        "data_types.buffer_dtype",
        lambda c: c.get("data_types", "buffer_dtype") is not None,
        "It would cast dedicated weights, which DeepSpeed takes for buffers. Drop the key.",
    ),
)


def check_supported(config: DsConfig) -> None:
    """Raises ValueError naming the first setting that dmuon cannot go with, and what to do."""
    for refusal in _REFUSED:
        if refusal.when(config):
            raise ValueError(
                f"the DeepSpeed config asks for {refusal.what}, which does not go with dedicated "
                f"matrices. {refusal.do}"
            )


def require_group() -> None:
    if not dist.is_initialized():
        raise ValueError(
            "no process group yet. Call deepspeed.init_distributed() before dedicate_params_zero; "
            "dmuon.zero.initialize does it."
        )


def check_model(model: nn.Module) -> None:
    """Raises ValueError where the model is of a kind that dmuon cannot take under ZeRO."""
    from dmuon.zero.seams import is_pipeline

    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if is_pipeline(model):
        raise ValueError(
            "the model is a PipelineModule, whose stages train other weights. Pipeline parallelism is "
            "not supported under ZeRO."
        )
    for name, _, _, parameter in slots(model):
        if getattr(parameter, "use_muon", False):
            raise ValueError(
                f"parameter {name!r} is tagged use_muon, so DeepSpeed's own Muon would orthogonalise it as "
                f"well. Remove the tag (del parameter.use_muon)."
            )
        if getattr(parameter, "allreduce", True) is False:
            raise ValueError(
                f"parameter {clean(name)!r} is an expert of DeepSpeed's MoE, reduced over a group of its "
                "own. Expert parallelism is not supported; leave MoE layers of DeepSpeed out."
            )

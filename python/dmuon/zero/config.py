"""A ds_config, read: what DeepSpeed is told, and what of it dmuon reads."""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature

import torch
import torch.distributed as dist

from dmuon.errors import nearest
from dmuon.optimizer import Muon

OPTIMIZER = "DMuon"
# Keywords of dmuon.Muon that mean nothing here: one group is one group of DeepSpeed's, and there is
# no tensor parallelism.
_NOT_HERE = ("self", "model", "param_groups", "tp_distributed_gram", "tp_distributed_gram_policy")
MUON_KEYS = tuple(k for k in signature(Muon.__init__).parameters if k not in _NOT_HERE)
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


def require_group() -> None:
    if not dist.is_initialized():
        raise ValueError(
            "no process group yet. Call deepspeed.init_distributed() before dedicate_params_zero; "
            "dmuon.zero.initialize does it."
        )

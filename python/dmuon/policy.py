"""Per-parameter policy: route, dtypes and how a weight of more than two dims is a matrix."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from dmuon.errors import choice, nearest

ROUTES = ("muon", "adamw", "sharded_adamw")
VIEWS = ("flatten", "batch")


@dataclass(frozen=True)
class ParamPolicy:
    """What ``param_policy`` may set for a parameter; ``None`` takes the default of the runtime."""

    route: str = "muon"
    view: str | None = None
    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool | None = None
    master_dtype: torch.dtype | None = None
    optim_dtype: torch.dtype | None = None


_KEYS = tuple(field.name for field in fields(ParamPolicy))
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _checked(where: str, values: Mapping) -> dict:
    """``values`` as keywords of ``ParamPolicy``; dtypes may be names."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}; it must be a dictionary of {', '.join(_KEYS)}.")
    checked = {}
    for key, value in values.items():
        if key not in _KEYS:
            raise ValueError(f"{where} has {key!r}, {nearest(key, _KEYS)}")
        if key == "route":
            choice(f"{where}['route']", value, ROUTES)
        elif key == "view":
            choice(f"{where}['view']", value, VIEWS)
        elif key.endswith("dtype"):
            value = _dtype(f"{where}[{key!r}]", value)
        else:
            choice(f"{where}[{key!r}]", value, (True, False, None))
        checked[key] = value
    return checked


def _dtype(where: str, value) -> torch.dtype | None:
    named = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}
    found = named.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if value is not None and found not in _FLOATS:
        raise ValueError(f"{where} is {value!r}; it must be one of {', '.join(map(str, _FLOATS))}.")
    return found


class PolicyTable:
    """``param_policy`` read once: defaults, then overrides in order; the later one wins."""

    def __init__(self, param_policy: Mapping | None, compute_dtype: torch.dtype | None):
        if not isinstance(param_policy, Mapping | None):
            raise ValueError(
                f"param_policy is {param_policy!r}; it must be {{'defaults': ..., 'overrides': [...]}}."
            )
        given = dict(param_policy or {})
        unknown = [key for key in given if key not in ("defaults", "overrides")]
        if unknown:
            raise ValueError(
                f"param_policy has {unknown[0]!r}, {nearest(unknown[0], ('defaults', 'overrides'))}"
            )
        defaults = _checked("param_policy['defaults']", given.get("defaults") or {})
        if compute_dtype is not None:
            defaults.setdefault("param_dtype", _dtype("compute_dtype", compute_dtype))
        self._defaults = ParamPolicy(**defaults)
        overrides = given.get("overrides") or []
        if not isinstance(overrides, list | tuple):
            raise ValueError(
                f"param_policy['overrides'] is {overrides!r}; it must be a list of {{'name': ..., 'set': ...}}."
            )
        self._overrides = [self._override(i, entry) for i, entry in enumerate(overrides)]
        self._matched = [False] * len(self._overrides)

    @staticmethod
    def _override(i: int, entry: Mapping) -> tuple[tuple[str, ...], dict]:
        where = f"param_policy['overrides'][{i}]"
        if not isinstance(entry, Mapping) or set(entry) != {"name", "set"}:
            raise ValueError(f"{where} is {entry!r}; it must have the keys 'name' and 'set'.")
        names = [entry["name"]] if isinstance(entry["name"], str) else entry["name"]
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
            raise ValueError(
                f"{where}['name'] is {names!r}; it must be a parameter's name or a part of it, a glob, or a list "
                "of those."
            )
        return tuple(names), _checked(f"{where}['set']", entry["set"])

    def of(self, name: str) -> ParamPolicy:
        policy = self._defaults
        for i, (patterns, values) in enumerate(self._overrides):
            if any(_matches(pattern, name) for pattern in patterns):
                self._matched[i] = True
                policy = replace(policy, **values)
        return policy

    def check_all_matched(self) -> None:
        for matched, (patterns, _) in zip(self._matched, self._overrides, strict=True):
            if not matched:
                raise ValueError(
                    f"the param_policy override for {list(patterns)} matches no dedicated "
                    "parameter. Correct its name, or remove it."
                )


def _matches(pattern: str, name: str) -> bool:
    """A substring, or with one of ``*?[`` a glob of the whole name."""
    return fnmatchcase(name, pattern) if set(pattern) & set("*?[") else pattern in name


def matrix_view(
    name: str, module: nn.Module, shape: torch.Size, view: str | None
) -> tuple[int, int, int]:
    """``(batch, rows, cols)`` in which Newton-Schulz sees a weight."""
    if len(shape) < 2:
        raise ValueError(
            f"parameter {name!r} has {len(shape)} dim(s), {tuple(shape)}; Muon orthogonalises "
            "matrices. Leave it out of the predicate: AdamW trains it."
        )
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if view is None and isinstance(module, nn.modules.conv._ConvNd):
        view = "flatten"
    if view is None and len(shape) == 3:
        view = "batch"
    if view is None:
        raise ValueError(
            f"parameter {name!r} has shape {tuple(shape)} and no view rule. Say how it is a matrix: "
            f"param_policy={{'overrides': [{{'name': {name!r}, 'set': {{'view': 'flatten'}}}}]}} "
            "(rows = dim 0) or 'batch' (leading dims are a batch of matrices)."
        )
    if view == "flatten":
        return 1, shape[0], shape[1:].numel()
    return shape[:-2].numel(), shape[-2], shape[-1]

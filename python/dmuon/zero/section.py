"""The ``"dmuon"`` section of a ds_config: which matrices, and how."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from dmuon.boundaries import containers
from dmuon.errors import check_keys, listed, nearest, summarised
from dmuon.names import matches, slots
from dmuon.policy import ROUTES
from dmuon.set_up import Settings
from dmuon.zero.config import OPTIMIZER, DsConfig

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
        check_keys('"dmuon"', given, known)
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
                        f"Parameters are {summarised(names)}.{suggestion(model)}"
                    )
        if not any(self.predicate(name, _Shaped(shape_of(p))) for name, _, _, p in slots(model)):
            raise ValueError(
                f'"dmuon" selects no parameter of this model: what "include" names has fewer than '
                f'{self.min_ndim} dims ("min_ndim"), or is in "exclude". Parameters are {summarised(names)}.'
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

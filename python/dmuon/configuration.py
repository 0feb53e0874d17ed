"""``dmuon.toml``: what the keyword arguments say, in a file.

Code beats the file, the file beats the environment. Of the environment dmuon reads, here and nowhere else:

- ``DMUON_CONFIG``: the file, where no path is given;
- ``DMUON_<SECTION>_<KEY>``, such as ``DMUON_MUON_LR=0.01``: what the file does not say.

(``DMUON_ISA``, which instructions the kernels may use, is read by them and is no setting of a training.)
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon import _C
from dmuon.agreement import together
from dmuon.ddp import dedicate_params_ddp, dedicate_params_ddp_tp
from dmuon.dedicate import dedicate_params
from dmuon.errors import check_keys, nearest
from dmuon.groups import world_control_group
from dmuon.names import matches
from dmuon.newton_schulz import (
    JORDAN_COEFFICIENTS,
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    NewtonSchulz,
)
from dmuon.optimizer import Muon
from dmuon.policy import PolicyTable
from dmuon.replicas import replicate, replicate_tp
from dmuon.saving import load_checkpoint, save_checkpoint
from dmuon.set_up import Predicate, Settings

_COEFFICIENTS = {
    "polar_express": POLAR_EXPRESS_COEFFICIENTS,
    "you": YOU_COEFFICIENTS,
    "jordan": JORDAN_COEFFICIENTS,
}
_SIBLINGS = {"ddp": dedicate_params_ddp, "ddp_tp": dedicate_params_ddp_tp}
_OTHERS = ("DMUON_CONFIG", "DMUON_ISA")
_SELECTION = ("kind", "include", "exclude", "min_ndim")


def load_config(path: str | os.PathLike | None = None) -> dict[str, dict]:
    """The sections of a ``dmuon.toml``, checked, over those of the environment. Local.

    Args:
        path: None: that of ``DMUON_CONFIG``, or no file.

    Raises:
        ValueError: naming file, line and key, or the variable: an unknown one (with the nearest known one), a wrong type
            or value, no TOML, no file.
    """
    said_by = "" if path is not None else "DMUON_CONFIG: "
    path = (os.environ.get("DMUON_CONFIG") or None) if path is None else os.fspath(path)
    if path is not None and not os.path.isfile(path):
        raise ValueError(f"{said_by}{path!r} is no file. Give the path of a dmuon.toml.")
    given, of_file = _of_environment(), _C.load_config(path) if path is not None else {}
    for section, entries in of_file.items():
        given[section] = {**given.get(section, {}), **entries}
    _check_whole(path, given)
    return given


def _check_whole(path: str | None, config: Mapping) -> None:
    """What a key alone does not tell."""
    where = path or "the environment"
    try:
        PolicyTable(config.get("policy"), None)
    except ValueError as error:
        raise ValueError(f"[policy] of {where}: {error}") from None
    if _kind(config) != "fsdp2" and "reshard_after_forward" in config.get("runtime", {}):
        raise ValueError(
            f'runtime.reshard_after_forward of {where} is for kind = "fsdp2"; with "{_kind(config)}" weights '
            "stay. Leave it out."
        )


def _of_environment() -> dict[str, dict]:
    """Raises ValueError naming the variable: no such key, or a value that is not one of its type."""
    known = {f"DMUON_{section}_{key}".upper(): (section, key) for section, key in _C.config_keys()}
    found: dict[str, dict] = {}
    for name in sorted(name for name in os.environ if _is_meant(name, known)):
        if name not in known:
            raise ValueError(f"the environment has {name}, {nearest(name, [*known, *_OTHERS])}")
        section, key = known[name]
        value = os.environ[name]
        if not value.isprintable():  # a surrogate is not either
            raise ValueError(f"{name} is {value!r}; it must be printable UTF-8 text.")
        found.setdefault(section, {}).update(
            _C.parse_config_value(section, key, value, name)[section]
        )
    return found


def _is_meant(name: str, known: Mapping[str, tuple]) -> bool:
    """Whether a variable is one of ours or a misspelt one; others may begin with DMUON_ too."""
    sections = tuple({f"DMUON_{section}_".upper() for section, _ in known.values()})
    words = [*known, *_OTHERS]
    misspelt = name.startswith("DMUON_") and difflib.get_close_matches(name, words, cutoff=0.9)
    return name not in _OTHERS and (name.startswith(sections) or bool(misspelt))


@dataclass(frozen=True)
class Configured:
    """A model that has been set up, and what its configuration says of the rest. ``from_config`` makes it."""

    model: nn.Module
    mesh: DeviceMesh
    owners: Mapping[str, int]
    config: dict[str, dict]

    def replicate(self) -> nn.Module:
        """The other parameters of ``kind = "ddp"`` and ``"ddp_tp"``. Collective."""
        kind = _kind(self.config)
        if kind == "fsdp2":
            raise ValueError(
                'runtime.kind is "fsdp2", where fully_shard takes the other parameters.'
            )
        return (replicate_tp if kind == "ddp_tp" else replicate)(self.model, self.mesh)

    def optimizer(self, **code) -> Muon:
        """``dmuon.Muon`` with the settings of [muon], [adamw] and [newton_schulz]; keywords of ``dmuon.Muon``
        given here (``code``) beat them. After ``fully_shard`` or ``replicate``. Collective."""
        return Muon(self.model, **{**_muon_keywords(self.config), **code})

    def save_checkpoint(self, step: int, optimizer: Muon, **code) -> str:
        """``dmuon.save_checkpoint`` of ``step`` into the directory of [checkpoint]; its keywords given here
        (``code``) beat the section's. Collective."""
        settings = dict(self.config.get("checkpoint", {}))
        directory = self._directory(settings)
        return save_checkpoint(directory, step, self.model, optimizer, **{**settings, **code})

    def load_checkpoint(self, optimizer: Muon, **code):
        """``dmuon.load_checkpoint`` from the directory of [checkpoint]; ``code`` are its keywords.
        Collective."""
        directory = self._directory(dict(self.config.get("checkpoint", {})))
        return load_checkpoint(directory, self.model, optimizer, **code)

    @staticmethod
    def _directory(settings: dict) -> str:
        if "directory" not in settings:
            raise ValueError(
                'the configuration has no checkpoint.directory. Add [checkpoint] directory = "...".'
            )
        return settings.pop("directory")


def from_config(
    path: str | os.PathLike | None,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    predicate: Predicate | None = None,
    replicate_mesh: DeviceMesh | None = None,
    **code,
) -> Configured:
    """Set a model up as a ``dmuon.toml`` says: ``dedicate_params``, or for ``kind = "ddp"`` and ``"ddp_tp"`` its
    siblings, with the keywords of [runtime] and [policy]::

        setup = dmuon.from_config("dmuon.toml", model, mesh)
        fully_shard(model, mesh=mesh)
        optimizer = setup.optimizer()

    Collective over the job.

    Args:
        path: None: that of ``DMUON_CONFIG``, or the environment alone.
        mesh: 1-D, the data-parallel slice.
        predicate: instead of ``runtime.include`` and ``exclude``.
        replicate_mesh: 1-D, as ``dedicate_params``'s; for ``kind = "fsdp2"``.
        code: keywords of ``dedicate_params``, which beat the file.

    Raises:
        ValueError: what ``load_config`` and ``dedicate_params`` refuse; no ``runtime.include`` and no predicate.
    """
    read = partial(_read, path, predicate, replicate_mesh, code)
    # Without a group dedicate_params says so; what is wrong with the file can be said first.
    grouped = dist.is_initialized()
    config, predicate = together(world_control_group(), read) if grouped else read()
    keywords = {k: v for k, v in config.get("runtime", {}).items() if k not in _SELECTION}
    if "policy" in config:
        keywords["param_policy"] = config["policy"]
    keywords |= code
    kind = _kind(config)
    if kind == "fsdp2":
        owners = dedicate_params(model, mesh, predicate, replicate_mesh=replicate_mesh, **keywords)
    else:
        owners = _SIBLINGS[kind](model, mesh, predicate, **keywords)
    return Configured(model, mesh, owners, config)


def _read(path, predicate, replicate_mesh, code: Mapping) -> tuple[dict[str, dict], Predicate]:
    """What is checked on each rank alone: the file, the environment and the keywords."""
    config = load_config(path)
    kind = _kind(config)
    call = _SIBLINGS.get(kind, dedicate_params)
    known = tuple(Settings.__dataclass_fields__)
    if kind == "fsdp2":
        known += ("reshard_after_forward",)
    elif replicate_mesh is not None:
        raise ValueError(f'replicate_mesh is for kind = "fsdp2", and runtime.kind is "{kind}".')
    check_keys(call.__name__, code, known)
    return config, predicate or _predicate(config.get("runtime", {}))


def _kind(config: Mapping) -> str:
    return config.get("runtime", {}).get("kind", "fsdp2")


def _predicate(runtime: Mapping) -> Predicate:
    if "include" not in runtime:
        raise ValueError(
            'the configuration has no runtime.include, and no predicate was given. Add [runtime] include = ["*_proj"], '
            "globs of a parameter's name or its module's path."
        )
    include, exclude = runtime["include"], runtime.get("exclude", [])
    least = runtime.get("min_ndim", 2)
    return lambda name, p: p.ndim >= least and matches(name, include) and not matches(name, exclude)


def _muon_keywords(config: Mapping) -> dict:
    keywords = dict(config.get("muon", {}))
    for key, value in config.get("adamw", {}).items():
        keywords[f"adamw_{key}"] = tuple(value) if key == "betas" else value
    schulz = dict(config.get("newton_schulz", {}))
    if "steps" in schulz:
        keywords["ns_steps"] = schulz.pop("steps")
    if "coefficients" in schulz:
        schulz["coefficients"] = _COEFFICIENTS[schulz["coefficients"]]
    if schulz:
        keywords["ns_backend"] = NewtonSchulz(**schulz)
    return keywords

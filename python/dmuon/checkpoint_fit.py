"""What of a checkpoint goes where in a training, and whether it fits. Local."""

from collections.abc import Mapping
from pathlib import Path

import torch

from dmuon import plain_data
from dmuon.errors import listed
from dmuon.extra_state import is_extra
from dmuon.given import misfits
from dmuon.param_groups import ADAMW_KEYS, MUON_KEYS, check_settings
from dmuon.tensor_parallel import overlapping

EXTRA = "extra_state."  # what a module keeps beside tensors: text, as bytes


def tensors_of(state: Mapping) -> dict[str, torch.Tensor]:
    """Those of a ``dmuon.state_dict``, by the names that a checkpoint has for them."""
    kept = {name for name in state["model"] if is_extra(name)}
    flat = {f"model.{name}": t for name, t in state["model"].items() if name not in kept}
    for name, entry in state.get("optim", {}).get("state", {}).items():
        flat |= {f"optim.{name}.{key}": t for key, t in entry.items()}
    return flat


def fitted(path: Path, content: Mapping, state: Mapping, dedicated: set[str]) -> tuple[dict, list]:
    """Which tensors are read, and which start anew: AdamW's state of a parameter of which the checkpoint has none,
    because it was frozen. State of one that is frozen now, and has none, is not read.

    Args:
        content: the manifest.
        dedicated: names of parameters; they always have a state.

    Returns:
        By name those to read, and the others.

    Raises:
        ValueError: with all that does not fit.
    """
    entries = state.get("optim", {}).get("state", {})
    mine = tensors_of(state)
    saved = {n: t for n, t in content["tensors"].items() if _concerns(n, state, entries)}
    had = {_owner(name) for name in saved}
    free = {f"optim.{name}" for name in entries if name not in dedicated} - had
    read = {name: t for name, t in mine.items() if _owner(name) not in free}
    problem = (
        _group_problem(path, content, state)
        or misfits(str(path), *_extras(content, state))
        or misfits(str(path), {n: _like(t) for n, t in saved.items()}, _shapes(read))
        or _kind_problem(path, saved, read)
    )
    if problem:
        raise ValueError(problem)
    return read, [t for name, t in mine.items() if name not in read]


def _extras(content: Mapping, state: Mapping) -> tuple[dict, dict]:
    """Saved ones and ours."""
    saved = [name.removeprefix(EXTRA) for name in content["tensors"] if name.startswith(EXTRA)]
    return dict.fromkeys(saved), dict.fromkeys(key for key in state["model"] if is_extra(key))


def _concerns(name: str, state: Mapping, entries: Mapping) -> bool:
    if not name.startswith("optim."):
        return name.startswith("model.")
    return "optim" in state and entries.get(_owner(name).removeprefix("optim."), True) != {}


def _owner(name: str) -> str:
    """Of an entry of optimizer state: its parameter, after ``optim.``."""
    return name.rpartition(".")[0] if name.startswith("optim.") else ""


def _like(tensor: Mapping) -> torch.Tensor:
    return torch.empty(tensor["size"], device="meta")


def _shapes(tensors: Mapping) -> dict[str, tuple]:
    return {name: tuple(t.size()) for name, t in tensors.items()}


def _kind_problem(path: Path, saved: Mapping, read: Mapping) -> str:
    """Of what has the right shape."""
    kinds = [
        f"{name!r} is {saved[name]['dtype']} and not {str(t.dtype).removeprefix('torch.')}"
        for name, t in read.items()
        if not torch.can_cast(getattr(torch, saved[name]["dtype"]), t.dtype)
    ]
    if kinds:
        return f"{path} does not fit, nothing was loaded. Of a dtype that cannot be cast: {'; '.join(kinds[:10])}."
    shared = overlapping(read)
    if not shared:
        return ""
    return (
        f"{path} cannot be loaded, nothing was: elements of {listed(shared)} share memory, as expand() makes them. "
        "Register the tensor's clone(memory_format=torch.contiguous_format)."
    )


def _group_problem(path: Path, content: Mapping, state: Mapping) -> str:
    groups = state.get("optim", {}).get("param_groups", {})
    saved = plain_data.loads(content["groups"])
    if groups and not saved:
        return f"{path} was saved without an optimizer. Load it without one."
    missing = [name for name in groups if name not in saved]
    if missing:
        return (
            f"{path} has no param group {missing[0]!r}; it has {', '.join(saved)}. Settings go by the names of "
            "groups: make dmuon.Muon with param_groups of the same group_name. To regroup, load into an optimizer "
            "with the saved groups, and take its state over with dmuon.get_optimizer_state_dict and "
            "set_optimizer_state_dict, which go by parameter."
        )
    return next(filter(None, (_bad_settings(path, n, saved[n]) for n in groups)), "")


def _bad_settings(path: Path, name: str, settings: Mapping) -> str:
    for key in {*MUON_KEYS, *ADAMW_KEYS} & settings.keys():
        value, two = settings[key], key == "betas"
        numbers = value if two else [value]
        if not isinstance(numbers, list | tuple) or not all(
            isinstance(n, int | float) for n in numbers
        ):
            wanted = "two numbers" if two else "a number"
            return f"{path} has {key} {value!r} in param group {name!r}; it must be {wanted}."
    try:
        check_settings(name, settings)
    except ValueError as error:
        return f"{path} has a param group that cannot be: {error}"
    return ""

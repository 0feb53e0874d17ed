"""dmuon's files of a checkpoint, one per rank: masters and optimizer state of what it owns, by name."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dmuon import _C
from dmuon.dedicated_state import state_shapes
from dmuon.errors import listed

_FILE = "dmuon_rank_{:05d}.pt"
_FORMAT = 1
NAMES = "dmuon_rank_*.pt"


def save(attached, directory: str, *, without_frozen: bool) -> None:
    """This rank's file. Collective: what goes wrong on one rank is raised on all."""
    attached.runtime.engine.wait_publishes()
    problem = ""
    try:
        os.makedirs(directory, exist_ok=True)
        path = _path(directory, dist.get_rank())
        torch.save(_content(attached, without_frozen), path + ".part")
        os.replace(path + ".part", path)
    except Exception as error:  # a peer must not wait for us
        problem = f"saving to {directory} failed on rank {dist.get_rank()}: {error}"
    _C.agree(
        attached.runtime.control.group_name,
        [f"tag\t{os.path.basename(directory)}"],
        problem,
        subject="save the same checkpoint",
        advice="Give every rank the same tag.",
    )


def _path(directory: str, rank: int) -> str:
    return os.path.join(directory, _FILE.format(rank))


def _content(attached, without_frozen: bool) -> dict:
    parameters = {}
    for param in attached.runtime.params:
        if param.is_owner and (param.parameter.requires_grad or not without_frozen):
            state = attached.optimizer.dedicated.state(param.index)
            parameters[param.param_name] = {"master": param._owned_data, **state}
    return {
        "format": _FORMAT,
        "ranks": dist.get_world_size(),
        "step": attached.engine.global_steps,
        "stage": attached.plan.stage,
        "parameters": parameters,
    }


def read(attached, directory: str, optimizer_state: bool, hint: str) -> dict[str, dict]:
    """What this rank owns now, whichever rank has saved it; nothing is changed.

    Collective: ValueError on all ranks, with one text, where any rank lacks something.

    Args:
        hint: what to do where there are no files.
    """
    problem, found = "", {}
    owned = [param for param in attached.runtime.params if param.is_owner]
    try:
        found = _read(directory, owned, optimizer_state, hint)
    except Exception as error:  # a peer must not wait for us
        problem = str(error) or type(error).__name__
    _C.agree(attached.runtime.control.group_name, [], problem)
    return found


def apply(attached, mine: dict[str, dict]) -> None:
    """Collective. The owner's values count."""
    runtime = attached.runtime
    for param in runtime.params:
        states = mine.get(param.param_name)
        if states is None:
            runtime.engine.mark_changed(param.index)
            continue
        runtime.set_value(param, states["master"])
        for key, value in attached.optimizer.dedicated.state(param.index).items():
            if key in states:
                value.copy_(states[key])


def check_fits(attached, directory: str) -> None:
    """DeepSpeed names its files by stage 3 or not, and at stage 3 every rank looks for its own; where there is
    none it fails without a word, on some ranks."""
    first, stage, ranks = _path(directory, 0), attached.plan.stage, dist.get_world_size()
    problem = ""
    if os.path.isfile(first):
        head = _open(first)
        if (head["stage"] == 3) != (stage == 3) or (stage == 3 and head["ranks"] < ranks):
            problem = (
                f"{directory} was saved at ZeRO stage {head['stage']} on {head['ranks']} ranks, which DeepSpeed "
                f"cannot load at stage {stage} on {ranks}. Load its weights into the model before initialize "
                "(deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint), then call "
                "dmuon.zero.load_dedicated(engine, directory) for the states of the dedicated matrices."
            )
    _C.agree(attached.runtime.control.group_name, [], problem)


def _read(directory: str, owned: list, optimizer_state: bool, hint: str) -> dict[str, dict]:
    wanted = {param.param_name: param for param in owned}
    found: dict[str, dict] = {}
    lacking: list[str] = []
    for path, content in _files(directory, hint, lacking):
        for name, states in content["parameters"].items():
            if name in wanted:
                found[name] = _checked(path, wanted[name], states, optimizer_state)
        if len(found) == len(wanted):
            return found
    # A frozen one may have been left out; the module's file has it otherwise.
    missing = [n for n, p in wanted.items() if n not in found and p.parameter.requires_grad]
    if missing and lacking:
        raise ValueError(f"{listed(lacking)}, which may have {listed(missing)}: missing.")
    if missing:
        raise ValueError(
            f"{directory} has no state of {listed(missing)} in its {NAMES}. Were other parameters dedicated "
            "when it was saved? Load with load_optimizer_states=False to take the weights alone."
        )
    return found


def _files(directory: str, hint: str, lacking: list[str]) -> Iterator[tuple[str, dict]]:
    """This rank's own first, where most often all of it is. An older save by more ranks may have left
    more files than belong to this one."""
    me = dist.get_rank()
    there = next((rank for rank in (0, me) if os.path.isfile(_path(directory, rank))), None)
    if there is None:
        raise ValueError(f"{directory} has no {_FILE.format(0)}{_seen(directory)}. {hint}")
    first = _path(directory, there)
    head = _open(first)
    for rank in sorted(range(head["ranks"]), key=lambda rank: rank != me):
        path = _path(directory, rank)
        if not os.path.isfile(path):
            lacking.append(path)
            continue
        content = head if path == first else _open(path)
        if any(content[key] != head[key] for key in ("ranks", "step")):
            raise ValueError(
                f"{path} is of step {content['step']} of {content['ranks']} ranks, {first} of step "
                f"{head['step']} of {head['ranks']}: a save was interrupted. Load another checkpoint."
            )
        yield path, content


def _seen(directory: str) -> str:
    return (
        "" if os.path.isdir(directory) else f", for rank {dist.get_rank()} sees no such directory"
    )


def _open(path: str) -> dict:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read, it may be truncated: {error}") from error
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {content.get('format')!r}; this dmuon reads {_FORMAT}."
        )
    return content


def _checked(path: str, param, states: dict, optimizer_state: bool) -> dict:
    wanted = {"master": tuple(param.full_shape)}
    if optimizer_state:
        wanted |= state_shapes(param)
    for key, shape in wanted.items():
        given = tuple(states[key].shape) if key in states else "missing"
        if given != tuple(shape):
            raise ValueError(
                f"{path}: {key} of {param.param_name!r} is {given}; it must have {tuple(shape)}."
            )
    return {key: states[key] for key in wanted}

"""Checkpoints of an engine: DeepSpeed's files with the dedicated weights in them, and dmuon's beside."""

import contextlib
import functools
import glob
import os

import torch
import torch.distributed as dist

from dmuon import _C
from dmuon.checkpoint import stand_in
from dmuon.errors import listed
from dmuon.optimizer import state_shapes
from dmuon.zero import seams

_FILE = "dmuon_rank_{:05d}.pt"
_FORMAT = 1


def install(engine, attached) -> None:
    """The engine's own calls save and load what dmuon owns, too."""
    for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model"):
        make = {"save_checkpoint": _saves, "load_checkpoint": _loads}.get(name, _shows_whole)
        setattr(engine, name, make(engine, getattr(engine, name), attached))
    if engine.zero_optimization_stage() == 3:
        seams.wrap(
            engine,
            "_zero3_consolidated_16bit_state_dict",
            "exclude_frozen_parameters",
            lambda original: _shows_whole(engine, original, attached),
        )


@contextlib.contextmanager
def whole_weights(attached, dtype: torch.dtype | None):
    """Module state dicts are complete while this lasts: rank 0's, the one that DeepSpeed's tools read, has
    every weight; at stage 3 another rank's has those that it owns. Collective.

    Args:
        dtype: of the weights; None: the masters' own.
    """
    runtime = attached.runtime
    if attached.shows_whole:  # one call of DeepSpeed's inside another
        yield
        return
    runtime.engine.wait_publishes()
    attached.shows_whole, shown = True, []
    try:
        for param in runtime.params:
            value = _shown(param, dtype, attached.plan.stage)
            for slot in param.slots:
                shown.append((slot, slot.current))
                slot.parameters[slot.attribute] = value
        yield
    finally:
        attached.shows_whole = False
        for slot, parameter in shown:
            slot.parameters[slot.attribute] = parameter


def _shown(param, dtype: torch.dtype | None, stage: int) -> torch.Tensor:
    whole = _on_rank_0(param)
    if whole is None and param.is_owner:
        whole = param._owned_data.clone()
    if whole is not None:
        return whole if dtype is None else whole.to(dtype)
    if stage < 3:
        return param.parameter.detach()
    return stand_in(param.full_shape, dtype or torch.float32)


def _on_rank_0(param) -> torch.Tensor | None:
    """The master there; one message from its owner."""
    me, owner, group = dist.get_rank(), param.owner_rank, param.runtime.job_group
    mine = param._owned_data
    if owner == 0:
        return mine.clone() if me == 0 else None
    if me == owner:
        dist.send(mine.contiguous(), dst=0, group=group)
    if me != 0:
        return None
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    whole = torch.empty(param.full_shape, dtype=dtype, device=param.parameter.device)
    dist.recv(whole, src=owner, group=group)
    return whole


def _shows_whole(engine, original, attached):
    @functools.wraps(original)
    def shows_whole(*args, **kwargs):
        with whole_weights(attached, attached.runtime.adapter.unit(0).compute_dtype):
            return original(*args, **kwargs)

    return shows_whole


def _saves(engine, original, attached):
    @functools.wraps(original)
    def save_checkpoint(save_dir, tag=None, *args, **kwargs):
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        save(attached, os.path.join(save_dir, tag))
        with whole_weights(attached, None):
            return original(save_dir, tag, *args, **kwargs)

    return save_checkpoint


def _loads(engine, original, attached):
    @functools.wraps(original)
    def load_checkpoint(
        load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, *args, **kwargs
    ):
        found = _resolve(engine, load_dir, tag)
        if found is None:  # DeepSpeed says what it thinks of it
            return original(
                load_dir, tag, load_module_strict, load_optimizer_states, *args, **kwargs
            )
        names = ("load_lr_scheduler_states", "load_module_only", "custom_load_fn")
        kwargs |= dict(zip(names, args))
        wants_state = load_optimizer_states and not kwargs.get("load_module_only", False)
        files = _files(attached, found, wants_state, engine.load_universal_checkpoint())
        runtime = attached.runtime
        runtime.absent = []
        try:
            result = original(load_dir, tag, load_module_strict, load_optimizer_states, **kwargs)
        finally:
            absent, runtime.absent = runtime.absent, None
        if result[0] is not None:
            load(attached, found, wants_state) if files else _check_loaded(runtime, absent)
            runtime.engine.spread_values()
            runtime.engine.show_residents()
        return result

    return load_checkpoint


def _resolve(engine, load_dir: str, tag) -> str | None:
    if tag is None:
        latest = "latest_universal" if engine.load_universal_checkpoint() else "latest"
        path = os.path.join(load_dir, latest)
        if not os.path.isfile(path):
            return None
        with open(path) as file:
            tag = file.read().strip()
    return os.path.join(load_dir, str(tag))


def save(attached, directory: str) -> None:
    """One file of this rank: masters and optimizer state of what it owns, by name."""
    runtime = attached.runtime
    runtime.engine.wait_publishes()
    states = {}
    for param in runtime.params:
        if param.is_owner:
            state = attached.optimizer.dedicated.state(param.index)
            states[param.param_name] = {"master": param._owned_data, **state}
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, _FILE.format(dist.get_rank()))
    content = {"format": _FORMAT, "ranks": dist.get_world_size(), "parameters": states}
    torch.save(content, path + ".part")
    os.replace(path + ".part", path)


def _files(attached, directory: str, required: bool, universal: bool) -> list[str]:
    """Checked before DeepSpeed loads anything, on all ranks alike."""
    files = sorted(glob.glob(os.path.join(glob.escape(directory), "dmuon_rank_*.pt")))
    problem = ""
    if not files and universal:
        problem = (
            f"{directory} has no dmuon_rank_*.pt: DeepSpeed's converter does not copy what it does not know. "
            "Copy these files from the checkpoint that was converted into it."
        )
    elif not files and required:
        problem = (
            f"{directory} has no dmuon_rank_*.pt, so the optimizer state of the dedicated matrices cannot be "
            "restored. Load with load_optimizer_states=False to take the weights alone."
        )
    _C.agree(
        attached.runtime.control.group_name,
        [f"files\t{[os.path.basename(f) for f in files]}"],
        problem,
        subject="see the same checkpoint",
        advice="Every rank must see the checkpoint's directory.",
    )
    return files


def load(attached, directory: str, optimizer_state: bool) -> None:
    """Each owner takes what it owns, whichever rank has saved it. All or nothing, on all ranks."""
    runtime = attached.runtime
    problem, mine = "", {}
    try:
        mine = _read(directory, [p for p in runtime.params if p.is_owner], optimizer_state)
    except Exception as error:  # a peer must not wait for us
        problem = str(error) or type(error).__name__
    _C.agree(runtime.control.group_name, [], problem)
    for param in runtime.params:
        states = mine.get(param.param_name)
        if states is None:
            runtime.engine.mark_changed(param.index)
            continue
        runtime.set_value(param, states.pop("master"))
        if optimizer_state:
            for key, value in attached.optimizer.dedicated.state(param.index).items():
                value.copy_(states[key])


def _read(directory: str, owned: list, optimizer_state: bool) -> dict[str, dict]:
    wanted = {param.param_name: param for param in owned}
    found: dict[str, dict] = {}
    own = os.path.join(directory, _FILE.format(dist.get_rank()))
    files = sorted(glob.glob(os.path.join(glob.escape(directory), "dmuon_rank_*.pt")))
    for path in sorted(files, key=lambda f: f != own):  # most often all of it is in one's own
        if len(found) == len(wanted):
            break
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if content.get("format") != _FORMAT:
            raise ValueError(
                f"{path} has format {content.get('format')!r}; this dmuon reads {_FORMAT}."
            )
        for name, states in content["parameters"].items():
            if name in wanted:
                _check_states(path, wanted[name], states, optimizer_state)
                found[name] = dict(states)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(
            f"{directory} has no state of {listed(missing)} in its dmuon_rank_*.pt. Were other parameters "
            "dedicated when it was saved? Load with load_optimizer_states=False to take the weights alone."
        )
    return found


def _check_states(path: str, param, states: dict, optimizer_state: bool) -> None:
    wanted = {"master": tuple(param.full_shape)}
    if optimizer_state:
        wanted |= state_shapes(param)
    for key, shape in wanted.items():
        given = tuple(states[key].shape) if key in states else "missing"
        if given != tuple(shape):
            raise ValueError(
                f"{path}: {key} of {param.param_name!r} is {given}; it must have {tuple(shape)}."
            )


def _check_loaded(runtime, absent: list[str]) -> None:
    """Without dmuon's files every weight must have come with the module's."""
    problem = (
        f"{listed(absent)} lie in another rank's file than the one that owns them now, and there is no "
        "dmuon_rank_*.pt."
        if absent
        else ""
    )
    _C.agree(runtime.control.group_name, [], problem)


def load_dedicated(engine, load_dir: str, tag: str | None = None) -> None:
    """Masters and optimizer state of the dedicated matrices alone, as any number of ranks has saved them.

    For a run on another number of ranks, where DeepSpeed refuses its own optimizer state:
    ``engine.load_checkpoint(dir, load_optimizer_states=False)``, then this. Collective.

    Args:
        tag: as ``load_checkpoint``'s; None: that of the file ``latest``.

    Raises:
        ValueError: on all ranks, before anything has changed: no such checkpoint; a matrix without state.
    """
    from dmuon.zero.attach import attached_to

    attached = attached_to(engine)
    directory = _resolve(engine, load_dir, tag)
    if directory is None:
        raise ValueError(f"{load_dir} has no file 'latest'. Give the tag.")
    _files(attached, directory, True, False)
    load(attached, directory, True)
    attached.runtime.engine.spread_values()
    attached.runtime.engine.show_residents()

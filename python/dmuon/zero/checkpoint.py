"""Checkpoints of an engine: DeepSpeed's files with the dedicated weights in them, and dmuon's beside."""

import contextlib
import functools
import inspect
import os

import torch
import torch.distributed as dist

from dmuon import _C
from dmuon.checkpoint import master_dtype, stand_in
from dmuon.errors import listed
from dmuon.zero import rank_files, seams


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
def whole_weights(attached, dtype: torch.dtype | None, *, without_frozen: bool = False):
    """Module state dicts are complete while this lasts: rank 0's, the one that DeepSpeed's tools read, has
    every weight; at stage 3 another rank's has those that it owns. Collective.

    Args:
        dtype: of the weights; None: the masters' own.
        without_frozen: leaves out those that are not trained.
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
            leave_out = without_frozen and not param.parameter.requires_grad
            for slot in param.slots:
                shown.append((slot, slot.current))
                slot.parameters[slot.attribute] = value
                slot.keep_out_of_state_dict(leave_out)
        yield
    finally:
        attached.shows_whole = False
        for slot, parameter in shown:
            slot.parameters[slot.attribute] = parameter
            slot.keep_out_of_state_dict(False)


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
    whole = torch.empty(param.full_shape, dtype=master_dtype(param), device=param.parameter.device)
    dist.recv(whole, src=owner, group=group)
    return whole


def _shows_whole(engine, original, attached):
    dtype = attached.runtime.adapter.unit(0).compute_dtype
    excludes = _excludes_frozen(original)

    @functools.wraps(original)
    def shows_whole(*args, **kwargs):
        without = excludes(*args, **kwargs)
        with whole_weights(attached, dtype, without_frozen=without):
            return original(*args, **kwargs)

    return shows_whole


def _excludes_frozen(original):
    """What a call of a method of DeepSpeed's says about it."""
    signature = inspect.signature(original)
    return lambda *args, **kwargs: bool(
        signature.bind(*args, **kwargs).arguments.get("exclude_frozen_parameters", False)
    )


def _saves(engine, original, attached):
    excludes = _excludes_frozen(original)

    @functools.wraps(original)
    def save_checkpoint(save_dir, tag=None, *args, **kwargs):
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        without = excludes(save_dir, tag, *args, **kwargs)
        rank_files.save(attached, os.path.join(save_dir, tag), without_frozen=without)
        with whole_weights(attached, None, without_frozen=without):
            return original(save_dir, tag, *args, **kwargs)

    return save_checkpoint


def _loads(engine, original, attached):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        found = _resolve(attached, given["load_dir"], given["tag"])
        if found is None:  # DeepSpeed says what it thinks of it
            return original(*args, **kwargs)
        wants_state = given["load_optimizer_states"] and not given["load_module_only"]
        if not wants_state:  # at stage 3 only without them DeepSpeed takes weights out of its files
            given["load_optimizer_states"] = False
        mine = _read(attached, found, wants_state)
        runtime = attached.runtime
        runtime.absent = []
        try:
            result = original(*call.args, **call.kwargs)
        finally:
            absent, runtime.absent = runtime.absent, None
        if result[0] is not None:
            _check_loaded(runtime, absent) if mine is None else rank_files.apply(attached, mine)
            _spread(runtime)
        return result

    return load_checkpoint


def _read(attached, directory: str, wants_state: bool) -> dict[str, dict] | None:
    """What dmuon's files have for this rank; None where DeepSpeed's have all that is asked for."""
    universal = attached.engine.load_universal_checkpoint()
    if universal:
        hint = (
            "DeepSpeed's converter does not copy what it does not know. Copy "
            f"{rank_files.NAMES} from the checkpoint that was converted into it."
        )
        return rank_files.read(attached, directory, wants_state, hint)
    rank_files.check_fits(attached, directory)
    if not wants_state:
        return None
    hint = (
        "Without it the optimizer state of the dedicated matrices cannot be restored. Load with "
        "load_optimizer_states=False to take the weights alone."
    )
    return rank_files.read(attached, directory, True, hint)


def _spread(runtime) -> None:
    runtime.engine.spread_values()
    runtime.engine.show_residents()


def _resolve(attached, load_dir: str, tag) -> str | None:
    """The checkpoint's directory; None where no rank finds the file that names it. Collective."""
    universal = attached.engine.load_universal_checkpoint()
    latest = os.path.join(load_dir, "latest_universal" if universal else "latest")
    if tag is None and os.path.isfile(latest):
        with open(latest) as file:
            tag = file.read().strip()
    _C.agree(
        attached.runtime.control.group_name,
        [f"tag\t{tag}"],
        subject="load the same checkpoint",
        advice=f"Every rank must see the file {os.path.basename(latest)!r}, or be given the same tag.",
    )
    return None if tag is None else os.path.join(load_dir, str(tag))


def _check_loaded(runtime, absent: list[str]) -> None:
    """Without dmuon's files every weight must have come with the module's."""
    problem = f"DeepSpeed's files have no value of {listed(absent)}." if absent else ""
    _C.agree(runtime.control.group_name, [], problem)


def load_dedicated(engine, load_dir: str, tag: str | None = None) -> None:
    """Masters and optimizer state of the dedicated matrices alone, as any number of ranks has saved them.

    For a run on another number of ranks, where DeepSpeed refuses its own optimizer state:
    ``engine.load_checkpoint(dir, load_optimizer_states=False)``, then this. Collective.

    Args:
        load_dir: the directory given to ``engine.save_checkpoint``.
        tag: as ``load_checkpoint``'s; None: that of the file ``latest``.

    Raises:
        ValueError: on all ranks, before anything has changed: no such checkpoint; a matrix without state.
    """
    from dmuon.zero.attach import attached_to

    attached = attached_to(engine)
    directory = _resolve(attached, load_dir, tag)
    if directory is None:
        raise ValueError(f"{load_dir} has no file 'latest'. Give the tag.")
    mine = rank_files.read(attached, directory, True, "Was it saved with dmuon attached?")
    rank_files.apply(attached, mine)
    _spread(attached.runtime)

"""Whole optimizer state: what one process would save, from any topology and into any other."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon.checkpoint import from_owner, my_part
from dmuon.errors import listed
from dmuon.full_state import Source, misfits, snapshot
from dmuon.optimizer import Muon, in_shards, optimizer_of, state_shapes
from dmuon.runtime import Runtime, runtime_of_whole

# A group of torch.optim.Muon has it. Its momentum is a running mean, ours a running sum.
_OF_TORCH_MUON = "ns_coefficients"
_PLACING = "tp_distributed_gram"  # says where momenta lie: nothing for a state that is whole
_NOT_SETTINGS = ("params", "group_name", "route", "param_names", _PLACING)
_MASTER = "master"  # the float32 weight of a 16-bit parameter: an entry that may be missing
_WHAT = "the optimizer's state_dict"


def get_optimizer_state_dict(
    model: nn.Module,
    optimizer: Muon,
    *,
    cpu_offload: bool = True,
    rank0_only: bool = True,
    as_torch: bool = False,
) -> dict:
    """The optimizer's state in torch's format, whole and by name: ``{"state": {name: {key: tensor}},
    "param_groups": [{"params": [names], "lr": ...}]}``, equal to that of the same training in one process.

    Collective over the job. Beyond the result, each rank holds one whole tensor at a time.

    Args:
        cpu_offload, rank0_only: as ``get_model_state_dict``'s.
        as_torch: momenta as ``torch.optim.Muon`` keeps them, ``1 - momentum`` times ours, so that
            ``torch.distributed.checkpoint.state_dict`` loads them into it.

    Raises:
        ValueError: ``optimizer`` is not the ``dmuon.Muon`` of ``model``.
    """
    runtime = _runtime_of_both(model, optimizer)
    runtime.engine.wait_reductions()
    receives = not rank0_only or runtime.global_rank == runtime.axes.job[0]
    dedicated = {id(p.parameter): p for p in runtime.params}
    names = optimizer.parameter_names()
    state: dict[str, dict] = {}
    for group in optimizer.param_groups:
        mean = 1 - float(group["momentum"]) if as_torch and group["route"] == "muon" else 1.0
        for p in group["params"]:
            values = _whole_state(optimizer, p, dedicated.get(id(p)), mean)
            kept = {key: snapshot(v, cpu_offload) if receives else None for key, v in values}
            if kept:
                state[names[id(p)]] = kept
    groups = [_named(group, names, optimizer, as_torch) for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups} if receives else {}


def _runtime_of_both(model: nn.Module, optimizer) -> Runtime:
    runtime = runtime_of_whole(model)
    if isinstance(runtime.adapter, _C.ZeroAdapter):
        raise ValueError(
            "under DeepSpeed the optimizer's state is in part DeepSpeed's. Use engine.save_checkpoint and "
            "load_checkpoint, or dmuon.state_dict(engine, optimizer, dedicated_only=True) for the dedicated "
            "matrices."
        )
    optimizer_of(runtime, optimizer)
    return runtime


def _whole_state(optimizer, p, param, mean: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Every rank goes through the same keys."""
    if param is None:
        for key, value in optimizer.state.get(p, {}).items():
            yield key, value.full_tensor() if isinstance(value, DTensor) else value
        return
    mine = optimizer.engine_state(param)
    for key, shape in state_shapes(param).items():
        whole = from_owner(param, mine.get(key), shape, cut=in_shards(param, key))
        yield key, whole * mean if key == "momentum_buffer" and mean != 1 else whole
    if param.dtype.itemsize < 4:  # the model's dictionary has it rounded
        yield _MASTER, from_owner(param, param._owned_data)


def _named(group: Mapping, names: Mapping[int, str], optimizer: Muon, as_torch: bool) -> dict:
    left_out = _NOT_SETTINGS if as_torch else ("params", _PLACING)
    settings = {key: value for key, value in group.items() if key not in left_out}
    if as_torch and group["route"] == "muon":
        settings |= optimizer.torch_settings()
    return {"params": [names[id(p)] for p in group["params"]], **settings}


def set_optimizer_state_dict(model: nn.Module, optimizer: Muon, state_dict: Mapping) -> None:
    """Load what ``get_optimizer_state_dict`` gives, or what
    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` gives of ``torch.optim.Muon`` and
    ``torch.optim.AdamW`` over the same parameters.

    Strict, and all or nothing; collective as ``set_model_state_dict`` is. A parameter without state starts
    anew, as in torch. Settings of a group (``lr``, ``momentum``, ...) are those that its parameters were saved
    with.

    Raises:
        ValueError: on all ranks, naming what is missing, unexpected or of another shape.
    """
    runtime = _runtime_of_both(model, optimizer)
    names = optimizer.parameter_names()
    dedicated = {id(p.parameter): p for p in runtime.params}
    parameters = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
    wanted = {
        name: _dedicated_shapes(dedicated[id(p)]) if id(p) in dedicated else _adamw_shapes(p)
        for name, p in parameters.items()
    }
    source = Source(runtime, state_dict, lambda given: _problem(given, wanted), _WHAT)
    saved = source.tell(_skeleton(source.given) if source.has_it else None)
    for group in optimizer.param_groups:
        members = [names[id(p)] for p in group["params"]]
        group |= _settings(group, saved["groups"], members)
    for name, p in parameters.items():
        _load(optimizer, source, name, p, dedicated.get(id(p)), wanted[name], saved)
    runtime.spread_values()
    runtime.engine.show_residents()
    optimizer.state_was_loaded()


def _dedicated_shapes(param) -> dict[str, tuple]:
    return {**state_shapes(param), _MASTER: tuple(param.full_shape)}


def _adamw_shapes(p: torch.Tensor) -> dict[str, tuple]:
    shape = tuple(p.shape)
    return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}


def _problem(given: Mapping, wanted: Mapping[str, dict]) -> str:
    if set(given) != {"state", "param_groups"}:
        return f"{_WHAT} has the keys {sorted(map(str, given))}; it must have 'state' and 'param_groups'."
    held = [name for group in given["param_groups"] for name in group["params"]]
    if not all(isinstance(name, str) for name in held):
        return (
            f"{_WHAT} names parameters by position; it must name them by name, as "
            "dmuon.get_optimizer_state_dict does."
        )
    names = misfits(f"{_WHAT}, of param_groups,", dict.fromkeys(held), dict.fromkeys(wanted))
    unknown = [name for name in given["state"] if name not in wanted]
    if names or unknown:
        return names or f"{_WHAT} has state of {listed(unknown)}, which this model has not."
    flat = {f"{n}.{k}": v for n, entry in given["state"].items() for k, v in entry.items()}
    shapes = {
        f"{n}.{k}": s
        for n, keys in wanted.items()
        if given["state"].get(n)
        for k, s in keys.items()
        if k != _MASTER or k in given["state"][n]
    }
    return misfits(_WHAT, flat, shapes)


def _skeleton(given: Mapping) -> dict:
    """What every rank must know before the tensors come: which states there are, and the groups."""
    return {
        "state": {name: list(entry) for name, entry in given["state"].items() if entry},
        "groups": [dict(group) for group in given["param_groups"]],
    }


def _settings(group: Mapping, saved: list[dict], members: list[str]) -> dict:
    """Those of the group that the first member was saved in."""
    theirs = next(g for g in saved if members[0] in g["params"])
    settings = {key: theirs[key] for key in group if key in theirs and key not in _NOT_SETTINGS}
    if "initial_lr" in theirs:  # a scheduler's
        settings["initial_lr"] = theirs["initial_lr"]
    return {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}


def _load(optimizer, source: Source, name: str, p, param, shapes: dict, saved: dict) -> None:
    there, values = saved["state"].get(name, ()), {}
    for key in there:
        value = source.given["state"][name][key] if source.has_it else None
        device = "cpu" if key == "step" else p.device
        values[key] = source.take(value, shapes[key], torch.float32, device)
    group = next(g for g in saved["groups"] if name in g["params"])
    if "momentum_buffer" in values and _OF_TORCH_MUON in group:
        values["momentum_buffer"] = values["momentum_buffer"] / (1 - float(group["momentum"]))
    if param is None:
        optimizer.set_symmetric_state(p, values)
        return
    if _MASTER in values:
        param.runtime.set_value(param, values[_MASTER])
    for key, mine in optimizer.engine_state(param).items():
        mine.copy_(my_part(param, key, values[key])) if there else mine.zero_()

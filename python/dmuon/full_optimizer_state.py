"""Whole optimizer state: what one process would save, from any topology and into any other."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from dmuon import _C
from dmuon.agreement import on_every_rank
from dmuon.checkpoint import from_owner, master_dtype
from dmuon.dedicated_state import in_shards, my_part, state_shapes
from dmuon.engine_optimizer import optimizer_of
from dmuon.errors import listed
from dmuon.full_state import snapshot
from dmuon.given import Source, misfits
from dmuon.optimizer import Muon
from dmuon.param_groups import check_settings
from dmuon.runtime import Runtime, runtime_of_whole
from dmuon.states import MASTER, NOT_SETTINGS, PLACING, MuonStates, plain, plain_settings

# A group of torch.optim.Muon has it. Its momentum is a running mean, ours a running sum.
_OF_TORCH_MUON = "ns_coefficients"
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

    A 16-bit parameter whose optimizer has a float32 weight has that as ``"master"``, too: dedicated ones, and
    all that DeepSpeed trains.

    Collective over the job. Beyond the result, each rank holds one whole tensor at a time.

    Args:
        optimizer: under DeepSpeed any that ``deepspeed.initialize`` gives. Its groups are two here, ``<i>/muon`` and
            ``<i>/adamw``.
        cpu_offload, rank0_only: as ``get_model_state_dict``'s.
        as_torch: momenta as ``torch.optim.Muon`` keeps them, ``1 - momentum`` times ours, so that
            ``torch.distributed.checkpoint.state_dict`` loads them into it.

    Raises:
        ValueError: ``optimizer`` is not the ``dmuon.Muon`` of ``model``.
    """
    runtime, states = _of_both(model, optimizer)
    runtime.engine.wait_reductions()
    receives = not rank0_only or runtime.global_rank == runtime.axes.job[0]
    dedicated = {id(p.parameter): p for p in runtime.params}
    groups = states.groups()
    state: dict[str, dict] = {}
    for group in groups:
        mean = 1 - float(group["momentum"]) if as_torch and group["route"] == "muon" else 1.0
        for name in group["params"]:
            p = states.parameters[name]
            values = _whole_state(states, p, dedicated.get(id(p)), mean)
            kept = {key: snapshot(v, cpu_offload) if receives else None for key, v in values}
            if kept:
                state[name] = kept
    groups = [_shown(group, states, as_torch) for group in groups]
    return {"state": state, "param_groups": groups} if receives else {}


def _of_both(model: nn.Module, optimizer) -> tuple[Runtime, MuonStates]:
    runtime = runtime_of_whole(model)
    on_every_rank(runtime, lambda: optimizer_of(runtime, optimizer))
    return runtime, runtime.front.states(runtime)


def _whole_state(states, p, param, mean: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Every rank goes through the same keys."""
    if param is None:
        yield from states.whole(p)
        return
    mine = states.engine_state(param)
    for key, shape in state_shapes(param).items():
        whole = from_owner(
            param, mine.get(key), shape, cut=in_shards(param, key), dtype=torch.float32
        )
        yield key, whole * mean if key == "momentum_buffer" and mean != 1 else whole
    if param.dtype.itemsize < 4:  # the model's dictionary has it rounded
        yield MASTER, from_owner(param, param._owned_data)


def _shown(group: Mapping, states, as_torch: bool) -> dict:
    left_out = NOT_SETTINGS if as_torch else ("params", PLACING)
    settings = {key: plain(value) for key, value in group.items() if key not in left_out}
    if as_torch and group["route"] == "muon":
        settings |= states.torch_settings()
    return {"params": group["params"], **settings}


def set_optimizer_state_dict(model: nn.Module, optimizer: Muon, state_dict: Mapping) -> None:
    """Load what ``get_optimizer_state_dict`` gives, or what
    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` gives of ``torch.optim.Muon`` and
    ``torch.optim.AdamW`` over the same parameters.

    Strict, and all or nothing; collective as ``set_model_state_dict`` is. A parameter without state starts
    anew, as in torch. Settings of a group (``lr``, ``momentum``, ...) are those that its parameters were saved
    with.

    Under DeepSpeed, at stages 1 to 3, AdamW counts the steps of a group as one: a parameter without state among
    others starts with moments of zero at their step, as one that nobody used. State of a parameter that DeepSpeed
    does not train, a frozen one, is left out. Its loss scale, its counters and its scheduler are not in the dictionary.

    Args:
        state_dict: whole, by name; the whole dictionary on every rank, or on the job's first one alone.

    Raises:
        ValueError: on all ranks, naming what is missing, unexpected or of another shape; under DeepSpeed, step counts
            that differ where it has one, and an lr of 0 for Muon beside one for AdamW.
    """
    runtime, states = _of_both(model, optimizer)
    dedicated = {id(p.parameter): p for p in runtime.params}
    wanted = {
        name: _of_dedicated(dedicated[id(p)])
        if id(p) in dedicated
        else _of_adamw(runtime.front.like(p))
        for name, p in states.parameters.items()
    }

    def problem(given: Mapping) -> str:
        return _problem(given, wanted) or states.problem(given)

    source = Source(runtime, state_dict, problem, _WHAT)
    saved = source.tell(_skeleton(source.given) if source.has_it else None)
    _agree_on_groups(runtime, saved["groups"])
    states.restart({name for name, keys in saved["state"].items() if set(keys) - {MASTER}})
    for name, p in states.parameters.items():
        _load(states, source, name, p, dedicated.get(id(p)), wanted[name], saved)
    runtime.spread_values()
    runtime.engine.show_residents()
    states.set_groups(saved["groups"])


def _meta(shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _of_dedicated(param) -> dict[str, torch.Tensor]:
    states = {key: _meta(shape) for key, shape in state_shapes(param).items()}
    return {**states, MASTER: _meta(param.full_shape, master_dtype(param))}


def _of_adamw(whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """Moments of 16-bit parameters are float32 under DeepSpeed."""
    moment = _meta(whole.shape, torch.promote_types(whole.dtype, torch.float32))
    return {"exp_avg": moment, "exp_avg_sq": moment, "step": _meta(()), MASTER: _meta(whole.shape)}


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
    needed = {
        f"{n}.{k}": like
        for n, keys in wanted.items()
        for k, like in keys.items()
        if k in given["state"].get(n, ())
        or (k != MASTER and set(given["state"].get(n, ())) - {MASTER})
    }
    return misfits(_WHAT, flat, needed) or _bad_settings(given["param_groups"])


def _bad_settings(groups: list[Mapping]) -> str:
    try:
        for i, group in enumerate(groups):
            check_settings(f"{_WHAT}, group {group.get('group_name', i)}", group)
    except ValueError as error:
        return f"{error} Nothing was loaded."
    return ""


def _agree_on_groups(runtime: Runtime, groups: list[Mapping]) -> None:
    lines = [
        f"group {i}, {key}\t{plain(value)!r}"
        for i, group in enumerate(groups)
        for key, value in group.items()
        if key != "params"
    ]
    _C.agree(
        runtime.control.group_name,
        sorted(lines),
        subject="load the same optimizer state",
        advice="Give the same dictionary on every rank, or give it on the job's first one alone.",
    )


def _skeleton(given: Mapping) -> dict:
    """What every rank must know before the tensors come: which states there are, and the groups."""
    return {
        "state": {name: list(entry) for name, entry in given["state"].items() if entry},
        "groups": [plain_settings(group) for group in given["param_groups"]],
    }


def _load(states, source: Source, name: str, p, param, wanted: dict, saved: dict) -> None:
    there, values = saved["state"].get(name, ()), {}
    for key in there:
        value = source.given["state"][name][key] if source.has_it else None
        value = source.take(value, wanted[key], p.device)
        values[key] = value.cpu() if key == "step" else value
    group = next(g for g in saved["groups"] if name in g["params"])
    if "momentum_buffer" in values and _OF_TORCH_MUON in group:
        values["momentum_buffer"] = values["momentum_buffer"] / (1 - float(group["momentum"]))
    if param is None:
        states.set(p, values)
        return
    if MASTER in values:
        param.runtime.set_value(param, values[MASTER])
    for key, mine in states.engine_state(param).items():
        mine.copy_(my_part(param, key, values[key])) if key in values else mine.zero_()

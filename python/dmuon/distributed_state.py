"""State that ``torch.distributed.checkpoint`` saves and loads as it lies, without gathering it."""

from collections.abc import Mapping

import torch
from torch import nn

from dmuon import _C
from dmuon.agreement import on_every_rank
from dmuon.checkpoint import OwnedTensor, master_dtype, owned_tensor
from dmuon.dedicated_state import in_shards, state_shapes
from dmuon.engine_optimizer import optimizer_of
from dmuon.extra_state import extra_states
from dmuon.names import clean
from dmuon.optimizer import Muon
from dmuon.pieces import Pieces
from dmuon.runtime import Runtime, runtime_of_whole
from dmuon.states import put
from dmuon.tensor_parallel import local_part

# tp_distributed_gram says where momenta lie here; what is saved lies anywhere.
_NOT_SAVED = ("params", "group_name", "route", "tp_distributed_gram")


def state_dict(
    model: nn.Module, optimizer: Muon | None = None, *, dedicated_only: bool = False
) -> "State":
    """Model and optimizer for ``torch.distributed.checkpoint``: every rank has all keys and writes what it owns::

        state = dmuon.state_dict(model, optimizer)
        dcp.save({"app": state}, checkpoint_id=path)  # async_save as well
        dcp.load({"app": state}, checkpoint_id=path)  # on any number of ranks, mesh and runtime

    A dictionary, ``{"model": {name: tensor}, "optim": {"state": {name: ...}, "param_groups": {group_name:
    ...}}}``, and a ``Stateful``, which reads and writes the training itself each time it is asked. Saved as a
    plain dictionary it is loaded by ``state.load_state_dict(state)`` after ``dcp.load(state)``.

    Dedicated weights are float32 masters, on their owner alone; every other rank has an ``OwnedTensor``, which
    takes no part. Collective: every rank calls it.

    Args:
        optimizer: the ``dmuon.Muon`` of ``model``; under DeepSpeed what ``initialize`` gives.
        dedicated_only: the dedicated matrices and their optimizer state, without groups: the same under every
            runtime. Under DeepSpeed it must be True: what DeepSpeed shards goes into its own files, or into the
            whole dictionaries of ``get_model_state_dict`` and ``get_optimizer_state_dict``.

    Raises:
        ValueError: ``optimizer`` is not that of ``model``; DeepSpeed, and ``dedicated_only`` is not given.
    """
    runtime = runtime_of_whole(model)
    return on_every_rank(runtime, lambda: State(model, optimizer, dedicated_only=dedicated_only))


class State(dict):
    """See ``dmuon.state_dict``, which makes it. To make it is local."""

    def __init__(self, model: nn.Module, optimizer: Muon | None, *, dedicated_only: bool = False):
        runtime = runtime_of_whole(model)
        if isinstance(runtime.adapter, _C.ZeroAdapter) and not dedicated_only:
            raise ValueError(
                "under DeepSpeed this has the dedicated matrices alone. For everything use engine.save_checkpoint and "
                "load_checkpoint, or, to go to another runtime or stage, dmuon.get_model_state_dict(engine) and "
                "dmuon.get_optimizer_state_dict(engine, optimizer); for the matrices alone "
                "dmuon.state_dict(engine, optimizer, dedicated_only=True)."
            )
        self._model, self._dedicated_only = model, dedicated_only
        self._optimizer = None if optimizer is None else optimizer_of(runtime, optimizer)
        super().__init__(self.state_dict())

    def state_dict(self) -> dict:
        """What there is now; tensors are the training's own memory. Pending publishes end first. Local."""
        runtime, optimizer = runtime_of_whole(self._model), self._optimizer
        runtime.engine.wait_reductions()
        runtime.engine.wait_publishes()
        state: dict = {"model": _masters(runtime)}
        if optimizer is not None:
            state["optim"] = {"state": _dedicated_state(runtime, optimizer)}
        if not self._dedicated_only:
            state["model"] = _of_model(runtime, state["model"])
            if optimizer is not None:
                state["optim"] = _of_optimizer(runtime, optimizer, state["optim"]["state"])
        return state

    def load_state_dict(self, state_dict: Mapping) -> None:
        """Takes over what ``dcp.load`` has put there. Collective.

        Args:
            state_dict: this object, or a dictionary of the same form.
        """
        runtime, optimizer = runtime_of_whole(self._model), self._optimizer
        _load_masters(runtime, state_dict["model"])
        if not self._dedicated_only:
            _load_symmetric(runtime, state_dict["model"])
        runtime.spread_values()
        runtime.engine.show_residents()
        if optimizer is None:
            return
        _load_dedicated_state(runtime, optimizer, state_dict["optim"]["state"])
        if not self._dedicated_only:
            _load_optimizer(runtime, optimizer, state_dict["optim"])


def _masters(runtime: Runtime) -> dict[str, torch.Tensor]:
    return {name: _master(param) for param in runtime.params for name in param.names}


def _of_model(runtime: Runtime, masters: Mapping) -> dict[str, torch.Tensor]:
    """In the order of the module's own."""
    state = {
        clean(key): masters.get(clean(key), value)
        for key, value in runtime.model().state_dict().items()
    }
    # Hooks of the model's own may give a weight other names.
    return state | {name: master for name, master in masters.items() if name not in state}


def _master(param) -> torch.Tensor:
    master = param._owned_data
    if master is None:
        return owned_tensor(param, param.param_name, master_dtype(param))
    return _placed(param, master, param.layout.dim is not None)


def _load_masters(runtime: Runtime, given: Mapping[str, torch.Tensor]) -> None:
    for param in runtime.params:
        value = given[param.param_name]
        if param.is_owner and not isinstance(value, OwnedTensor):
            runtime.engine.set_value(param.index, _memory(value).detach())
        else:
            runtime.engine.mark_changed(param.index)


def _load_symmetric(runtime: Runtime, given: Mapping[str, torch.Tensor]) -> None:
    dedicated = {name for param in runtime.params for name in param.names}
    extras = extra_states(runtime.model())
    for key, mine in runtime.model().state_dict().items():
        name = clean(key)
        if name in extras:
            extras[name].set_extra_state(given[name])
        elif name not in dedicated:
            _copy(mine, given[name])


@torch.no_grad()
def _copy(mine: torch.Tensor, given: torch.Tensor) -> None:
    local_part(mine).copy_(local_part(given))


def _dedicated_state(runtime: Runtime, optimizer) -> dict[str, dict]:
    return {param.param_name: _of_dedicated(optimizer, param) for param in runtime.params}


def _of_optimizer(runtime: Runtime, optimizer: Muon, dedicated: Mapping) -> dict:
    """In the order of the groups."""
    optimizer.fill_state()
    names = optimizer.parameter_names() | {id(p.parameter): p.param_name for p in runtime.params}
    state = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            state[name] = dedicated.get(name) or dict(optimizer.state[p])
    groups = {
        group["group_name"]: {k: v for k, v in group.items() if k not in _NOT_SAVED}
        for group in optimizer.param_groups
    }
    return {"state": state, "param_groups": groups}


def _of_dedicated(optimizer, param) -> dict[str, torch.Tensor]:
    mine = optimizer.engine_state(param)
    return {
        key: _placed(param, mine[key], in_shards(param, key))
        if mine
        else owned_tensor(param, f"{param.param_name}.{key}", torch.float32, shape)
        for key, shape in state_shapes(param).items()
    }


def _placed(param, mine: torch.Tensor, cut: bool) -> torch.Tensor | Pieces:
    if not cut:
        return mine if param.is_tp_owner else owned_tensor(param, param.param_name, mine.dtype)
    layout = param.layout
    return Pieces(mine, param.full_shape, layout.dim, layout.ranges[param.runtime.tp_rank])


def _memory(value) -> torch.Tensor:
    return value.local if isinstance(value, Pieces) else local_part(value)


def _load_dedicated_state(runtime: Runtime, optimizer, given: Mapping) -> None:
    for param in runtime.params:
        for key, mine in optimizer.engine_state(param).items():
            value = given[param.param_name][key]
            if not isinstance(value, OwnedTensor):
                mine.copy_(_memory(value))


def _load_optimizer(runtime: Runtime, optimizer: Muon, given: Mapping) -> None:
    dedicated = {id(p.parameter) for p in runtime.params}
    names = optimizer.parameter_names()
    for group in optimizer.param_groups:
        saved = given["param_groups"][group["group_name"]]
        put(group, {key: value for key, value in saved.items() if key not in _NOT_SAVED})
        for p in group["params"]:
            if id(p) not in dedicated:
                for key, mine in optimizer.state[p].items():
                    _copy(mine, given["state"][names[id(p)]][key])
    optimizer.state_was_loaded()

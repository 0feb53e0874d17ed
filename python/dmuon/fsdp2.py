"""FSDP2's side: which parameters it must skip, and what it was told about each unit."""

import functools
import warnings
from collections.abc import Iterator, Set

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon.states import MuonStates
from dmuon.tensor_parallel import distribute_like


class Ignored(Set):
    """The dedicated parameters of a model, or of all models: whatever object their slots hold when
    asked, since ``to_empty`` and ``.to`` replace Parameter objects."""

    def __init__(self, model: nn.Module | None = None):
        self._model = model

    @classmethod
    def _from_iterable(cls, parameters) -> set:
        """What `|`, `&` and `-` give: a plain set."""
        return set(parameters)

    def _current(self) -> Iterator[nn.Parameter]:
        from dmuon.runtime import runtime_of, runtimes

        owners = runtimes() if self._model is None else [runtime_of(self._model)]
        for runtime in owners:
            for param in runtime.params:
                yield from (s.current for s in param.slots if s.current is not None)

    def __contains__(self, parameter) -> bool:
        return any(parameter is current for current in self._current())

    def __iter__(self):
        return iter({id(p): p for p in self._current()}.values())

    def __len__(self) -> int:
        return len({id(p) for p in self._current()})


class Union(Set):
    def __init__(self, *sets):
        self._sets = sets

    def __contains__(self, parameter) -> bool:
        return any(parameter in s for s in self._sets)

    def __iter__(self):
        return iter({id(p): p for s in self._sets for p in s}.values())

    def __len__(self) -> int:
        return len({id(p) for s in self._sets for p in s})


def ignored_params(model: nn.Module) -> Set:
    """The dedicated parameters of ``model``, for ``fully_shard(..., ignored_params=)``.

    Live: it follows ``to_empty`` and other calls that make new Parameter objects. Local.

    Raises:
        ValueError: the model has no dedicated parameters.
    """
    from dmuon.runtime import runtime_of

    runtime_of(model)
    return Ignored(model)


def units_under(module: FSDPModule, recurse: bool):
    """Settings of the units whose boundary lies in ``module``; without ``recurse`` only of those
    that no FSDP module below it holds."""
    from dmuon.runtime import runtimes

    inside = {id(m) for m in module.modules()}
    for runtime in runtimes():
        for param in runtime.params:
            holder = param.slots[0].module()
            if id(holder) not in inside:
                continue
            if recurse or _enclosing(module, holder) is module:
                yield runtime.adapter.unit(runtime.engine.unit_of(param.index))


def _enclosing(root: nn.Module, target: nn.Module) -> FSDPModule | None:
    """The innermost FSDP module on the way from ``root`` to ``target``."""
    return next((fsdp for module, fsdp in _with_enclosing(root) if module is target), None)


def _with_enclosing(module: nn.Module, fsdp=None):
    fsdp = module if isinstance(module, FSDPModule) else fsdp
    yield module, fsdp
    for child in module.children():
        yield from _with_enclosing(child, fsdp)


def wrap_forward_method(module: nn.Module, method_name: str) -> None:
    """Module hooks do not run for such a method; ours do their work around it."""
    from dmuon.runtime import runtimes

    boundaries = [
        b for runtime in runtimes() for b in runtime.boundary_hooks if b.module() is module
    ]
    if not boundaries or not hasattr(module, method_name):
        return
    method = getattr(module, method_name)

    @functools.wraps(method)
    def with_whole_weights(*args, **kwargs):
        for boundary in boundaries:
            boundary.enter()
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            for boundary in reversed(boundaries):
                boundary.leave(output)
        return output

    setattr(module, method_name, with_whole_weights)


resident = False  # with reshard_after_forward=False too: not between steps


def check_axes(axes, chosen) -> None:
    """Every mesh will do."""


def check_complete(runtime) -> None:
    """Parameters outside of any ``fully_shard`` are their user's affair. Those that a forward has left whole
    are put away: the optimizer takes what stays."""
    for module in runtime.model().modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def before_adopting(runtime) -> None:
    """Initial values are the owner's: nothing to do."""


def whole(value: torch.Tensor) -> torch.Tensor:
    """Of a parameter or buffer that the runtime keeps. Collective where it is cut."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: torch.Tensor) -> torch.Tensor:
    """On the meta device: what ``whole`` gives."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


@torch.no_grad()
def assign(mine: torch.Tensor, value: torch.Tensor) -> None:
    """This rank's part of a whole tensor, into what the runtime keeps."""
    mine.copy_(distribute_like(mine, value))


def states(runtime) -> MuonStates:
    """Of the runtime's ``dmuon.Muon``."""
    return MuonStates(runtime.optimizer(), runtime.front)


def make_adapter(units: int, ranks: int) -> "_C.Fsdp2Adapter":
    return _C.Fsdp2Adapter(units, float(ranks))


def check_slot(param) -> None:
    """Raises ValueError where FSDP2 or parallelize_module took a dedicated parameter."""
    current, axes = param.parameter, param.runtime.axes
    if not isinstance(current, DTensor):
        return
    names = current.device_mesh.mesh_dim_names or ()
    taken = not names or bool(set(names) & axes.dp_names)
    if not taken and param.was_dtensor:
        return
    if not taken:
        raise ValueError(
            f"the dedicated parameter {param.param_name!r} became a DTensor over {names} after "
            "dedicate_params. Call parallelize_module first, then dedicate_params, then fully_shard."
        )
    raise ValueError(
        f"fully_shard took the dedicated parameter {param.param_name!r}: this call did not see "
        "dmuon's set. Import dmuon before the module that calls fully_shard, or pass "
        "fully_shard(..., ignored_params=dmuon.ignored_params(model))."
    )


def settle(runtime) -> None:
    """What the enclosing fully_shard was told becomes the unit's dtypes."""
    for param in runtime.params:
        check_slot(param)
    model = runtime.model()
    enclosing = {id(module): fsdp for module, fsdp in _with_enclosing(model)}
    for param in runtime.params:
        policy = _mp_policy(enclosing.get(id(param.slots[0].module())))
        unit = runtime.adapter.unit(runtime.engine.unit_of(param.index))
        param_dtype = param.policy.param_dtype or getattr(policy, "param_dtype", None)
        unit.compute_dtype = param_dtype or param.dtype
        reduce_dtype = param.policy.grad_dtype or getattr(policy, "reduce_dtype", None)
        if reduce_dtype is None:
            reduce_dtype = unit.compute_dtype if policy is not None else torch.float32
        # Sums are float32; float64 gradients travel as float32 too.
        unit.reduce_dtype = torch.float32 if reduce_dtype == torch.float64 else reduce_dtype


def _mp_policy(fsdp: FSDPModule | None):
    """The MixedPrecisionPolicy given to fully_shard; torch offers no public way to read it."""
    if fsdp is None:
        return None
    state = fsdp._get_fsdp_state() if hasattr(fsdp, "_get_fsdp_state") else None
    policy = getattr(state, "_mp_policy", None)
    if policy is None:
        warnings.warn(
            f"this torch does not say which MixedPrecisionPolicy {type(fsdp).__name__} has; set "
            "param_policy={'defaults': {'param_dtype': ..., 'grad_dtype': ...}} in dedicate_params.",
            stacklevel=2,
        )
    return policy

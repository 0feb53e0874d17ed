"""What DeepSpeed's users reach for: names, fp32 values, gradients and states of single parameters."""

import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

from dmuon.checkpoint import from_owner
from dmuon.dedicated_state import state_shapes
from dmuon.errors import nearest
from dmuon.names import clean


def named_parameters(engine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """All parameters of ``engine.module``, dedicated ones among them, by their original names and in their
    original order. Local.

    The values are what a forward computes with: at stage 3 they are there only while they are used
    (``full_fp32_param`` gives them); at stages 0 to 2 this waits for the last step's updates.
    """
    from dmuon.zero.attach import attached_to

    attached = attached_to(engine)
    if attached.runtime.resident:
        attached.runtime.engine.wait_publishes()
    found = {clean(name): p for name, p in engine.module.named_parameters()}
    found |= {param.param_name: param.parameter for param in attached.runtime.params}
    order = {name: i for i, name in enumerate(attached.plan.names)}
    yield from sorted(found.items(), key=lambda item: order.get(item[0], len(order)))


def full_fp32_param(engine, name: str) -> torch.Tensor:
    """The whole weight in float32 as its optimizer has it: the master of a dedicated one, DeepSpeed's of any
    other. Collective: every rank calls it, and gets it.

    Args:
        name: as ``dmuon.zero.named_parameters`` gives it.

    Returns:
        float32, the whole shape, a copy.

    Raises:
        ValueError: no parameter has that name.
    """
    from dmuon.zero.attach import attached_to

    found = dict(named_parameters(engine))
    if name not in found:
        raise ValueError(f"full_fp32_param got {name!r}, {nearest(name, tuple(found))}")
    parameter = found[name]
    dedicated = dedicated_of(parameter)
    if dedicated is None:
        return attached_to(engine).partitions.full_fp32(parameter)
    return from_owner(dedicated, dedicated._owned_data)


def dedicated_of(parameter: torch.Tensor):
    """Its ``DedicatedParam``; None for a parameter of DeepSpeed's."""
    mapping = getattr(parameter, "_hp_mapping", None)
    return mapping.param if isinstance(mapping, Helper) else None


def install(attached) -> None:
    """DeepSpeed's own helpers (``safe_get_full_fp32_param`` and its like) ask the parameter itself."""
    for param in attached.runtime.params:
        helper = Helper(attached, param)
        parameter = param.parameter
        parameter._hp_mapping = parameter._hp_grad = helper
        for name in (
            "get_full_hp_param",
            "set_full_hp_param",
            "get_full_hp_grad",
            "set_full_hp_grad",
        ):
            setattr(parameter, name, getattr(helper, name))


class Helper:
    """One dedicated parameter, in DeepSpeed's words. Every method is collective."""

    def __init__(self, attached, param):
        # A parameter that held these would keep itself alive, through the engine, where the collector
        # of cycles cannot look.
        self._attached_ref, self._param_ref = weakref.ref(attached), weakref.ref(param)

    @property
    def _attached(self):
        return self._alive(self._attached_ref())

    @property
    def param(self):
        return self._alive(self._param_ref())

    @staticmethod
    def _alive(found):
        if found is None:
            raise RuntimeError("the engine that trained this parameter is gone.")
        return found

    def get_full_hp_param(self, optim_state_key: str | None = None) -> torch.Tensor:
        param = self.param
        if optim_state_key is None:
            return from_owner(param, param._owned_data)
        shapes = self._known_state(optim_state_key)
        mine = self._attached.optimizer.dedicated.state(param.index)
        held, shape = mine.get(optim_state_key), shapes[optim_state_key]
        return from_owner(param, held, shape, dtype=torch.float32)

    def set_full_hp_param(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        param = self.param
        if optim_state_key is None:
            self._check_shape(value, param.full_shape)
            param.runtime.set_value(param, value)
            param.runtime.engine.show_residents()
            return
        shapes = self._known_state(optim_state_key)
        self._check_shape(value, shapes[optim_state_key])
        mine = self._attached.optimizer.dedicated.state(param.index)
        if mine:
            mine[optim_state_key].copy_(value)

    def get_full_hp_grad(self) -> torch.Tensor | None:
        """The mean over the ranks, with the loss scale still in it; None before a backward pass."""
        param = self.param
        self._attached.reduce()
        mine = param.parameter.grad if param.is_owner else None
        there = torch.tensor([float(mine is not None)])
        dist.broadcast(there, src=param.owner_rank, group=param.runtime.control)
        if not there.item():
            return None
        return from_owner(param, mine)

    def set_full_hp_grad(self, value: torch.Tensor) -> None:
        param = self.param
        self._check_shape(value, param.full_shape)
        self._attached.reduce()
        if param.is_owner:
            param.parameter.grad = value.detach().float().clone()

    def _known_state(self, key: str) -> dict:
        shapes = state_shapes(self.param)
        if key not in shapes:
            raise ValueError(
                f"{self.param.param_name!r} has no state {key!r}; it has {', '.join(shapes)}."
            )
        return shapes

    def _check_shape(self, value: torch.Tensor, shape) -> None:
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"a value of shape {tuple(value.shape)} was given for {self.param.param_name!r}; it must have "
                f"{tuple(shape)}."
            )

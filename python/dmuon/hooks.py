"""Module hooks: each crosses into C++ once."""

import weakref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dmuon import _C


class Boundary:
    """One boundary module and the dedicated parameters that its call makes whole."""

    def __init__(self, runtime, index: int, path: str, module: nn.Module, params: list):
        self.path, self.params = path, params
        self.module = weakref.ref(module)
        # C++ holds these callables where the garbage collector does not look: no cycles.
        mine, whose = weakref.ref(self), weakref.ref(runtime)
        self._hook = _C.BoundaryHook(
            engine=runtime.engine,
            boundary=index,
            settle=lambda: whose().settle(),
            replaced=lambda: whose().slot_replaced(mine()),
        )
        self.enter, self.leave = self._hook.enter, self._hook.leave
        self.refresh()
        self._resident = runtime.resident
        self.handles = self._register(module)

    def move_to(self, module: nn.Module) -> None:
        """A wrapper around the module, whose call is compiled as a whole: hooks inside would be traced."""
        for handle in self.handles:
            handle.remove()
        self.module = weakref.ref(module)
        self.handles = self._register(module, prepend=True)  # before those of fully_shard, as ever

    def _register(self, module: nn.Module, *, prepend: bool = False) -> list:
        pre, post = _PreHook(self._hook), _PostHook(self._hook)
        pre.path = post.path = self.path
        pre.resident = post.resident = self._resident
        return [
            module.register_forward_pre_hook(pre),
            module.register_forward_hook(post, always_call=True, prepend=prepend),
            *_cast_hooks(module, self.params),
        ]

    def refresh(self) -> None:
        """The slots hold other Parameter objects than before."""
        self._hook.set_slots(
            [
                (slot.parameters, slot.attribute, param.parameter)
                for param in self.params
                for slot in param.slots
            ]
        )


class _Copied:
    """What a hook becomes in a copy of its module: the copy's weights are not dmuon's."""

    def __init__(self, boundary: str):
        self.boundary = boundary

    def __call__(self, *args):
        raise RuntimeError(
            f"module {self.boundary!r} is a copy of one whose weights dmuon manages; the copy is not "
            "managed and holds placeholders. Copy the model before dedicate_params, or build a new one "
            "and load dmuon's state into it."
        )


def nothing(*args, **kwargs) -> None:
    """The hook of a copy that holds whole weights: it is a module like any other."""


def name_of_nothing():
    return nothing


class OfTheOriginal:
    """A hook that its module's copies do not have: base class."""

    def __deepcopy__(self, memo):
        return nothing

    def __reduce__(self):
        return name_of_nothing, ()


class _Unmanaged:
    """What the copies of a hook become."""

    path: str
    resident: bool

    def __deepcopy__(self, memo):
        return nothing if self.resident else _Copied(self.path)

    def __reduce__(self):
        return (name_of_nothing, ()) if self.resident else (_Copied, (self.path,))


class _PreHook(_Unmanaged, _C.PreHook):
    pass


class _PostHook(_Unmanaged, _C.PostHook):
    pass


def _cast_hooks(module: nn.Module, params: list) -> list:
    """What ``param_policy`` asks of a boundary's inputs and outputs."""
    handles = []
    policies = [param.policy for param in params]
    inputs = next(
        (p.param_dtype for p in policies if p.cast_forward_inputs and p.param_dtype), None
    )
    outputs = next((p.output_dtype for p in policies if p.output_dtype), None)
    if inputs:
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _cast((args, kwargs), inputs), with_kwargs=True
            )
        )
    if outputs:
        handles.append(module.register_forward_hook(lambda _, args, output: _cast(output, outputs)))
    return handles


def _cast(tree, dtype: torch.dtype):
    def cast(value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return pytree.tree_map(cast, tree)

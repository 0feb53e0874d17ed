"""Module hooks: each crosses into C++ once."""

import weakref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dmuon import _C


class Boundary:
    """One boundary module and the dedicated parameters that its call makes whole."""

    def __init__(self, runtime, index: int, path: str, module: nn.Module, params: list):
        self.runtime, self.index, self.path, self.params = runtime, index, path, params
        self.module = weakref.ref(module)
        self.refresh()
        self.handles = [
            module.register_forward_pre_hook(_PreHook(self)),
            module.register_forward_hook(_PostHook(self), always_call=True),
            *_cast_hooks(module, params),
        ]

    def refresh(self) -> None:
        slots = [
            (module._parameters, attribute, param.parameter)
            for param in self.params
            for module, attribute in param.slots
        ]
        self._hook = _C.BoundaryHook(self.runtime.engine, self.index, slots)

    def enter(self) -> None:
        if not self.runtime.settled:
            self.runtime.settle()
        if not self._hook.enter():
            self.runtime.slot_replaced(self)

    def leave(self, output) -> None:
        self._hook.leave(output)


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


class _PreHook:
    """Not traced by torch.compile: it moves memory."""

    def __init__(self, boundary: Boundary):
        self._path = boundary.path
        self._enter = torch._dynamo.disable(boundary.enter)

    def __call__(self, module, args):
        self._enter()

    def __deepcopy__(self, memo):
        return _Copied(self._path)

    def __reduce__(self):
        return _Copied, (self._path,)


class _PostHook(_PreHook):
    def __init__(self, boundary: Boundary):
        self._path = boundary.path
        self._leave = torch._dynamo.disable(boundary.leave)

    def __call__(self, module, args, output):
        self._leave(output)


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

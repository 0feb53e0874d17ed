"""State dicts that are never silently wrong.

A dedicated weight lies on its owner alone. ``model.state_dict()`` holds the value there, and an
``OwnedTensor`` elsewhere: it has shape and dtype and refuses to give numbers it does not have.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dmuon.hooks import name_of_nothing, nothing
from dmuon.tensor_parallel import wrap_like

_QUIET = ("detach", "alias")
# They rearrange: no numbers are needed for it.
_MOVES = {"view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "cat"}
_MOVES |= {"permute", "transpose", "t", "unsqueeze", "squeeze"}


def asked_by_torch_distributed() -> bool:
    """Whether the caller of the function that calls this is a part of it."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("torch.distributed.")


class OwnedTensor(torch.Tensor):
    """Stands for a tensor that lies on another rank: shape, dtype and device, and no values. Reading or saving
    it is a RuntimeError that names the owner. dmuon makes it; local.

    Args:
        shape, dtype, device: of the tensor it stands for.
        name: of the parameter, or of its state.
        owner_rank: where the tensor lies, as ``dist.get_rank()`` counts.
    """

    @staticmethod
    def __new__(cls, shape, dtype, device, name: str, owner_rank: int):
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        self._dmuon_name, self._dmuon_owner = name, owner_rank
        self._dmuon_identity = torch.UntypedStorage(1)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        owned = next(a for a in tensors if isinstance(a, OwnedTensor))
        name = func.__name__.split(".")[0]
        if name in _QUIET:
            return owned
        if all(isinstance(a, OwnedTensor) for a in tensors):
            if name in _MOVES:
                return owned._moved(func, args, kwargs or {})
            if name == "copy_" and args[0].shape == args[1].shape:
                return args[0]
        raise owned._refusal()

    def _moved(self, func, args, kwargs):
        """What ``func`` would make of the values, without any."""

        def on_meta(a: torch.Tensor) -> torch.Tensor:
            return torch.empty(a.shape, dtype=a.dtype, device="meta")

        args, kwargs = pytree.tree_map_only(OwnedTensor, on_meta, (args, kwargs))
        made = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda a: self._like(a.shape, a.dtype), made)

    def _like(self, shape, dtype, device=None) -> "OwnedTensor":
        """Of the same parameter and owner."""
        return OwnedTensor(shape, dtype, device or self.device, self._dmuon_name, self._dmuon_owner)

    def to(self, *args, **kwargs) -> "OwnedTensor":
        """Has no values either: exporters change the dtype of everything, and then write."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        return self._like(self.shape, dtype or self.dtype, device)

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"{self._dmuon_name!r} lies on rank {self._dmuon_owner} alone; this rank cannot read or save "
            "it. Call dmuon.get_model_state_dict(model) on all ranks for whole weights, or read it on its "
            "owner."
        )

    def __repr__(self, **kwargs):
        return (
            f"OwnedTensor({self._dmuon_name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"owner_rank={self._dmuon_owner})"
        )

    def __deepcopy__(self, memo):
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """No values: what writers of checkpoints compare to find tied weights, on every rank, also on those
        that write nothing."""
        return self._dmuon_identity

    # torch.distributed.checkpoint asks these: nothing to write here, nothing to read.

    def __create_write_items__(self, fqn, object):
        return []

    def __create_chunk_list__(self):
        return []

    def __get_tensor_shard__(self, index):
        raise self._refusal()

    # Its staging for async_save makes the copy of a tensor so.

    def new_empty(self, *args, **kwargs):
        return self

    def data_ptr(self) -> int:
        if asked_by_torch_distributed():
            return 0  # no memory to copy
        raise self._refusal()

    def storage(self):  # what safetensors asks for
        raise self._refusal()

    def __reduce_ex__(self, protocol):
        raise self._refusal()

    def tolist(self):
        raise self._refusal()

    def numpy(self, *args, **kwargs):
        raise self._refusal()


def owned_tensor(param, name: str, dtype: torch.dtype, shape=None) -> OwnedTensor:
    shape = param.full_shape if shape is None else shape
    return OwnedTensor(shape, dtype, param.parameter.device, name, param.owner_rank)


def as_parameter(param, local: torch.Tensor) -> torch.Tensor:
    """This rank's part as a DTensor, where the parameter is one."""
    return wrap_like(param.parameter)(local) if param.was_dtensor else local


def install_hooks(runtime) -> None:
    """On every module that holds a dedicated parameter; they copy with the module, see hooks.py."""
    by_module: dict[nn.Module, list] = {}
    for param in runtime.params:
        for slot in param.slots:
            by_module.setdefault(slot.module(), []).append((slot.attribute, param))
    for module, held in by_module.items():
        module.register_state_dict_post_hook(_Save(held))
        module.register_load_state_dict_pre_hook(_Load(held))


class _Save:
    def __init__(self, held):
        self._held = held

    def __call__(self, module, state_dict, prefix, local_metadata):
        for attribute, param in self._held:
            if param.resident or not param.is_shown_by(module, attribute):
                param.runtime.engine.wait_publishes()  # torch has put the value there
                continue
            value = param._owned_data
            if value is None:
                value = owned_tensor(param, param.param_name, param.dtype)
            else:
                value = as_parameter(param, value.to(param.dtype))
            state_dict[prefix + attribute] = value

    def __deepcopy__(self, memo):
        return nothing if self._held[0][1].resident else _Unmanaged()

    def __reduce__(self):
        return (name_of_nothing if self._held[0][1].resident else _Unmanaged), ()


class _Load(_Save):
    """A plain tensor of the right shape becomes the owner's weight; an OwnedTensor changes nothing
    on a rank that does not own it."""

    def __call__(self, module, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        for attribute, param in self._held:
            key = prefix + attribute
            if key not in state_dict:
                continue
            value, fine = state_dict[key], len(errors)
            self._load(param, key, value, errors)
            given = not isinstance(value, OwnedTensor) and not is_absent(value)
            shown = param.resident and len(errors) == fine and given
            # torch copies it there, onto itself where nothing is shown
            state_dict[key] = _local(param, value) if shown else param.parameter

    @staticmethod
    def _load(param, key, value, errors) -> None:
        if tuple(value.shape) != tuple(param.full_shape):
            errors.append(
                f"size mismatch for {key}: the state dict has {tuple(value.shape)}, the model "
                f"{tuple(param.full_shape)}."
            )
        elif not isinstance(value, OwnedTensor) and not is_absent(value):
            param.runtime.set_value(param, value)
        elif param.is_owner and param.runtime.absent is not None:
            param.runtime.absent.append(key)
        elif param.is_owner:
            errors.append(f"{key} was saved on a rank that did not own it: {value!r}.")
        else:  # its owner loads it: what this rank keeps is of yesterday
            param.runtime.engine.mark_changed(param.index)


def stand_in(shape, dtype: torch.dtype) -> torch.Tensor:
    """Goes into a file for a weight that another rank's file has: four bytes, and the right shape."""
    return torch.full((1,), torch.nan, dtype=dtype).expand(tuple(shape))


def is_absent(value: torch.Tensor) -> bool:
    """Whether it is a ``stand_in``."""
    if isinstance(value, OwnedTensor) or not value.is_floating_point() or value.numel() < 2:
        return False
    spread = any(s for s, n in zip(value.stride(), value.shape) if n > 1)
    return not spread and bool(value.flatten()[0].isnan())


def _local(param, value: torch.Tensor) -> torch.Tensor:
    """What this rank's parameter holds of a whole weight."""
    if isinstance(value, DTensor) or not param.was_dtensor:
        return value
    return as_parameter(param, param.layout.local_of(value, param.runtime.tp_rank).contiguous())


class _Unmanaged:
    """In a copy of a managed module: its weights are placeholders."""

    def __call__(self, *args):
        raise RuntimeError(
            "this module is a copy of one whose weights dmuon manages; the copy is not managed and holds "
            "placeholders, so its state dict has no values. Use the original."
        )


def from_owner(
    param,
    mine: torch.Tensor | None,
    shape=None,
    *,
    cut: bool = True,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A copy of what its owner has, master, state or gradient, whole and on every rank of the job.

    Args:
        mine: this rank's, where it has any.
        shape: of the whole; the parameter's where it is None.
        cut: whether it lies in the shards of a tensor-parallel weight; otherwise on the TP owner.
        dtype: of the result; the master's where it is None. States are float32 always.
    """
    shape = tuple(param.full_shape if shape is None else shape)
    dtype = master_dtype(param) if dtype is None else dtype
    layout = param.layout
    if layout.dim is None or not cut:
        held = mine if param.is_tp_owner else None
        return _broadcast(param, param.owner_rank, shape, dtype, held)
    whole = torch.empty(shape, dtype=dtype, device=param.parameter.device)
    for tp, rank in enumerate(param.cell_ranks):
        part = list(shape)
        part[layout.dim] = sum(length for _, length in layout.ranges[tp])
        held = mine if rank == param.runtime.global_rank else None
        layout.put(whole, _broadcast(param, rank, part, dtype, held), tp)
    return whole


def master_dtype(param) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _broadcast(
    param, src: int, shape, dtype: torch.dtype, mine: torch.Tensor | None
) -> torch.Tensor:
    sent = torch.empty(tuple(shape), dtype=dtype, device=param.parameter.device)
    if mine is not None:
        sent.copy_(mine.detach())
    if sent.numel():
        dist.broadcast(sent, src=src, group=param.runtime.job_group)
    return sent

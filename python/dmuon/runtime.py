"""What a model under dmuon has: the engine, its parameters, its hooks."""

import atexit
import contextlib
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon.axes import Axes
from dmuon.collect import Chosen
from dmuon.errors import listed
from dmuon.exiting import let_threads_rest
from dmuon.tensor_parallel import Layout, local_part, wrapper_of

# The model given to dedicate_params -> its Runtime.
_runtimes: "weakref.WeakKeyDictionary[nn.Module, Runtime]" = weakref.WeakKeyDictionary()


class Slot:
    """A place in a module that holds a dedicated parameter. It does not keep the module alive."""

    parameters: dict  # where the module keeps it: its `_parameters`, or its `_buffers`

    def __init__(self, module: nn.Module, attribute: str):
        self.attribute = attribute
        self.parameters = module._parameters
        self.module = weakref.ref(module)

    def hide(self) -> None:
        """From everyone who walks over ``parameters()``: among the buffers, where attribute access and
        ``state_dict`` find it under the same name."""
        module = self.module()
        module._buffers[self.attribute] = module._parameters.pop(self.attribute)
        self.parameters = module._buffers

    def keep_out_of_state_dict(self, out: bool) -> None:
        """Of one that is hidden: as of a buffer that is not persistent."""
        names = self.module()._non_persistent_buffers_set
        names.add(self.attribute) if out else names.discard(self.attribute)

    @property
    def current(self) -> nn.Parameter | None:
        """None where somebody has deleted it."""
        return self.parameters.get(self.attribute)


@dataclass(eq=False)
class DedicatedParam:
    """One dedicated parameter, as ``get_owned_params`` and ``get_dedicated_params`` give it. Local to read.

    Attributes:
        param_name: its name in the model, also ``fqn``; ``names``: all of them, where it is tied.
        unit: path of the module whose call makes it whole.
        route: ``"muon"`` or ``"adamw"``.
        full_shape: whole, also over the tensor-parallel ranks; ``numel``: of its elements.
        _orig_size: the shape on this tensor-parallel rank.
        shard_dim: the dim that is cut over the tensor-parallel ranks, or None.
        tp_group: of the tensor-parallel ranks; None without them, and for one.
        owner_rank: who runs its Newton-Schulz, as ``dist.get_rank()`` counts; with tensor parallelism the TP
            owner. ``is_tp_owner``: whether that is this rank.
        cell_ranks: the ranks that hold its master: one, or one per TP rank. ``is_owner``: whether this rank
            is one of them.
        resident: whether the whole weight is on every rank, all the time.
        _owned_data: the master, float32 (float64 for a float64 parameter), on ranks with ``is_owner``, of
            shape ``_orig_size``; elsewhere None. The memory that the optimizer updates: after writing into
            it call ``broadcast_all_updates``, on all ranks.
    """

    runtime: "Runtime" = field(repr=False)
    index: int  # in the plan
    param_name: str
    names: tuple[str, ...]  # all of them, where it is tied
    unit: str
    route: str
    owner_rank: int  # as dist.get_rank() counts; with tensor parallelism the TP owner's
    cell_ranks: list[int]  # the ranks that hold its master: one, or one per TP rank
    full_shape: torch.Size
    dtype: torch.dtype
    slots: list[Slot] = field(repr=False)
    policy: object = field(repr=False)
    layout: Layout = field(repr=False)
    was_dtensor: bool = False  # when it was dedicated
    in_shards: bool = False  # Newton-Schulz without gathering it (tp_distributed_gram)
    tp_group: object = field(default=None, repr=False)

    @property
    def fqn(self) -> str:
        return self.param_name

    @property
    def _orig_size(self) -> torch.Size:
        """The shape on this tensor-parallel rank."""
        shape = list(self.full_shape)
        if self.shard_dim is not None:
            shape[self.shard_dim] = sum(n for _, n in self.layout.ranges[self.runtime.tp_rank])
        return torch.Size(shape)

    @property
    def shard_dim(self) -> int | None:
        """The dim that is cut over the tensor-parallel ranks."""
        return self.layout.dim

    @property
    def numel(self) -> int:
        return self.full_shape.numel()

    @property
    def is_owner(self) -> bool:
        """Whether the master lies on this rank, its shard of it where it is cut."""
        return self.runtime.global_rank in self.cell_ranks

    @property
    def is_tp_owner(self) -> bool:
        """Whether this rank runs its Newton-Schulz."""
        return self.owner_rank == self.runtime.global_rank

    @property
    def resident(self) -> bool:
        """Whether the whole weight is on every rank, all the time."""
        return self.runtime.resident

    @property
    def parameter(self) -> nn.Parameter:
        return self.slots[0].current

    def is_shown_by(self, module: nn.Module, attribute: str) -> bool:
        """Whether the slot holds our Parameter: not while a checkpoint shows whole weights."""
        held = next(
            s for s in self.slots if s.module() is module and s.attribute == attribute
        ).current
        return hasattr(held, "_dedicated_owner_rank")

    @property
    def _owned_data(self) -> torch.Tensor | None:
        """The owner's weight in float32 (float64 for a float64 parameter), this rank's shard where it is
        cut: the very memory that the optimizer updates. Elsewhere None. After writing into it call
        ``broadcast_all_updates``, on all ranks."""
        self.runtime.engine.wait_publishes()
        return self.runtime.engine.master(self.index)


class Runtime:
    """One model under dmuon. Made by ``dedicate_params``."""

    def __init__(self, model: nn.Module, chosen: list[Chosen], plan, axes: Axes, front):
        self.model = weakref.ref(model)
        self.plan = plan
        self.axes = axes
        self.front = front  # the module of the runtime: fsdp2, ddp
        self.global_ranks = axes.ranks
        self.global_rank = torch.distributed.get_rank()
        self.tp_rank = axes.position[2]
        self.params = [self._param(i, c) for i, c in enumerate(chosen)]
        self.engine: _C.Engine = None
        self.adapter: _C.RuntimeAdapter = None
        self.ring: _C.FlightRing = None
        self._counts: dict = {}
        self.control = None  # process group of agreements and norms
        self.optimizer = lambda: None  # a weak reference to the Muon that trains this model
        self.boundary_hooks: list = []
        self.settled = False
        self.on_device = False
        self.stepped = False
        self.no_sync_depth = 0
        self.values_at_setup: list = []
        self.absent: list[str] | None = None  # while a checkpoint loads: keys that its file lacks
        self.replicas = None  # what keeps the symmetric parameters equal, where dmuon does

    def owners(self) -> Mapping[str, int]:
        """Read-only: every name of every parameter -> owner rank. It keeps no weights alive."""
        return MappingProxyType({name: p.owner_rank for p in self.params for name in p.names})

    @property
    def resident(self) -> bool:
        """Whether whole weights are on every rank, all the time: DDP, ZeRO-0 to 2."""
        return self.front.resident

    @property
    def job_group(self):
        """A process group of all ranks of the job, for tensors on their device."""
        world = torch.distributed.group.WORLD
        covers = len(self.axes.job) == torch.distributed.get_world_size()
        return world if covers else self.control

    def _param(self, index: int, c: Chosen) -> DedicatedParam:
        cell_ranks = self.axes.cell_ranks(self.plan.owners[index])
        tp_parallel = self.axes.sizes[2] > 1 and isinstance(c.parameter, DTensor)
        return DedicatedParam(
            runtime=self,
            index=index,
            param_name=c.name,
            names=tuple(c.names),
            unit=c.unit or "root",
            route=c.policy.route,
            owner_rank=cell_ranks[self.plan.tp_owners[index]],
            cell_ranks=cell_ranks,
            full_shape=c.parameter.shape,
            dtype=c.parameter.dtype,
            slots=[Slot(module, attribute) for module, attribute in c.slots],
            policy=c.policy,
            layout=c.layout,
            was_dtensor=isinstance(c.parameter, DTensor),
            tp_group=self.axes.tp.get_group() if tp_parallel else None,
        )

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank counts the elements it holds of a symmetric parameter in a norm."""
        key = None
        if isinstance(parameter, DTensor):
            key = (parameter.device_mesh, tuple(parameter.placements))
        if key not in self._counts:
            self._counts[key] = self.axes.counts(parameter)
        return self._counts[key]

    def adopt(self) -> None:
        """Takes over the parameters that the slots hold now: at setup, and again where to_empty or a
        conversion has made new ones."""
        for param in self.params:
            current = param.parameter
            for slot in param.slots[1:]:
                slot.parameters[slot.attribute] = current
            self.engine.adopt(param.index, current, local_part(current), wrapper_of(current))
            current._dedicated_owner_rank = param.owner_rank
        for hook in self.boundary_hooks:
            hook.refresh()

    def settle(self) -> None:
        """Before the first forward or step: what FSDP2 was told is known now. Idempotent."""
        if self.settled:
            return
        self.front.settle(self)
        self.adopt_new()
        self.settled = True

    def adopt_new(self) -> None:
        """Adopts parameters that were on the meta device, or were replaced by to_empty, by now."""
        if any(not self.engine.adopted(self.engine.unit_of(p.index)) for p in self.params):
            self.adopt()

    def prepare_for_optimizer(self) -> None:
        """Raises ValueError where weights are still on the meta device."""
        if self.on_device:
            return
        self.settle()
        self.front.check_complete(self)
        meta = [p.param_name for p in self.params if p.parameter.is_meta]
        if meta:
            raise ValueError(
                f"{listed(meta)} are on the meta device. Call model.to_empty(device=...) and initialise "
                "the model before dmuon.Muon."
            )
        self.on_device = True

    def after_step(self) -> None:
        """Ends the clock's step. The first one without a single dedicated gradient is most often a mistake."""
        self.engine.clock().end_step()
        if self.stepped:
            return
        self.stepped = True
        if not self.optimizer()._muon.ns_calls() and self._owned_trainable():
            warnings.warn(
                "the first step had no gradient for any dedicated parameter of this rank. Likely causes: "
                "step() before backward(), a loss that does not depend on them, or their module called "
                "as module.forward(x) instead of module(x).",
                stacklevel=3,
            )

    def _owned_trainable(self) -> bool:
        return any(p.is_owner and p.parameter.requires_grad for p in self.params)

    def set_replicas_sync(self, on: bool) -> None:
        if self.replicas is not None:
            self.replicas.set_synchronize(on)

    def set_value(self, param: DedicatedParam, value: torch.Tensor) -> None:
        """Gives a parameter a new value. Every rank must call it; the owner's value counts."""
        if param.parameter.is_meta:
            raise ValueError(f"{param.param_name!r} is on the meta device; call to_empty first.")
        self.adopt_new()
        value = value.detach()
        if isinstance(value, DTensor):
            value = local_part(value.redistribute(placements=param.parameter.placements))
        else:
            value = param.layout.local_of(value, self.tp_rank)
        master = self.engine.master(param.index)
        if master is not None and _rounds_to(master, value):
            value = (
                master.clone()
            )  # which has more digits, as an optimizer's state dict has loaded it
        self.engine.set_value(param.index, value)

    def spread_values(self) -> None:
        """Give what was set to whoever holds it. Collective. Before ``settle``, when dtypes are not known yet,
        nothing: the first forward does it, or ``dmuon.Muon``."""
        if self.settled:
            self.engine.spread_values()

    def slot_replaced(self, boundary) -> None:
        """A slot of the boundary holds another object than ours."""
        for param in boundary.params:
            self.front.check_slot(param)
        raise ValueError(
            f"a dedicated parameter of module {boundary.path!r} was replaced after dedicate_params "
            f"(one of {listed([p.param_name for p in boundary.params])}). Replace parameters before "
            "dedicate_params; to set values use load_state_dict."
        )


def _rounds_to(master: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``value`` is a 16-bit master of the same weight."""
    return value.dtype.itemsize < 4 and torch.equal(master.to(value.dtype), value.to(master.device))


def register(model: nn.Module, runtime: Runtime) -> None:
    if not _runtimes:
        atexit.register(_drain)
    _runtimes[model] = runtime


def _drain() -> None:
    """At exit: peers wait for the publishes that this rank has not sent yet."""
    for runtime in runtimes():
        with contextlib.suppress(Exception):
            runtime.engine.wait_publishes()
    let_threads_rest()


def runtimes() -> list[Runtime]:
    return list(_runtimes.values())


def runtime_of_whole(model) -> Runtime:
    """As ``runtime_of``; a model of which only a part was dedicated is an error."""
    runtime = runtime_of(model)
    module = _unwrapped(model)
    if module is not runtime.model():
        raise ValueError(
            f"dedicate_params was called on a part of this {type(module).__name__}, a "
            f"{type(runtime.model()).__name__}; the rest would be left out in silence. Call "
            "dedicate_params on the whole model; its predicate chooses."
        )
    return runtime


def _unwrapped(model):
    """The registered module behind wrappers, or the innermost one."""
    module = model if isinstance(model, nn.Module) else getattr(model, "module", model)
    while isinstance(module, nn.Module) and module not in _runtimes:
        inner = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def runtime_of(model, *, optional: bool = False) -> Runtime | None:
    """The runtime of ``model``, or of a wrapper's inner module, or of a part of it.

    Raises:
        ValueError: there is none, or the model holds several.
    """
    module = _unwrapped(model)
    if isinstance(module, nn.Module):
        if module in _runtimes:
            return _runtimes[module]
        found = [_runtimes[m] for m in module.modules() if m in _runtimes]
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            raise ValueError(
                "this model holds several parts that were dedicated one by one. Call dedicate_params "
                "once, on the whole model."
            )
    if optional:
        return None
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"a {type(model).__name__} was given where the model is wanted that dedicate_params got. (HF Trainer "
            "by name: optimizer_cls_and_kwargs=(lambda: dmuon.Muon, {...}).)"
        )
    raise ValueError(
        f"this {type(model).__name__} has no dedicated parameters. Call "
        "dmuon.dedicate_params(model, mesh, predicate) first, before fully_shard."
    )

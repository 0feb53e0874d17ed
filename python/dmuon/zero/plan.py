"""``dedicate_params_zero``: the chosen matrices leave DeepSpeed's sight before it looks."""

import weakref
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dmuon import _C
from dmuon.agreement import together
from dmuon.errors import check_keys, listed
from dmuon.groups import control_group, world_control_group
from dmuon.names import slots
from dmuon.runtime import Runtime
from dmuon.set_up import Predicate, Settings, set_up
from dmuon.zero import seams
from dmuon.zero.config import DsConfig, require_group
from dmuon.zero.front import Resident, Stage3
from dmuon.zero.refusals import check_model, check_supported
from dmuon.zero.section import Section, shape_of


class Plan(Mapping):
    """Name of a dedicated parameter -> its owner rank, and what ``attach`` needs. It keeps no weights.

    ``dedicate_params_zero`` makes it, from ``runtime``, ``config`` and what is ``named`` in the model. Local to read.
    """

    def __init__(self, runtime: Runtime, config: DsConfig, named: list[tuple[str, nn.Parameter]]):
        self._runtime = runtime
        self.config = config
        self.stage = config.stage
        # Of all parameters, in the model's order, as they were before.
        self.names = [name for name, _ in named]
        self.dtypes = {id(p): p.dtype for _, p in named}
        self.optimizer = lambda: None  # weak: the OwnerOptimizer made from it
        self.attached = None
        self.made_by_initialize = False

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def note_optimizer(self, optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)

    def __getitem__(self, name: str) -> int:
        return self._runtime.owners()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runtime.owners())

    def __len__(self) -> int:
        return len(self._runtime.owners())


def dedicate_params_zero(
    model: nn.Module, ds_config, predicate: Predicate | None = None, **keywords
) -> Plan:
    """Give each chosen weight matrix one owner rank, and hide it from DeepSpeed. Call it before
    ``deepspeed.initialize`` and after ``deepspeed.init_distributed``.

    A dedicated weight stays where it was (``module.weight``, the same ``Parameter`` and the same key in
    ``state_dict``), but among the module's buffers: ``model.named_parameters()`` does not list it,
    ``dmuon.zero.named_parameters(engine)`` does. At stages 0 to 2 it is whole on every rank, all the time;
    at stage 3 on its owner, and elsewhere while it is used. Initial values are rank 0's, as DeepSpeed's.

    Collective over all ranks.

    Args:
        model: on any device, or built under ``deepspeed.zero.Init``.
        ds_config: the dictionary, or the path, that ``deepspeed.initialize`` will get. Read: the stage,
            dtypes, ``gradient_allreduce_op`` and, without ``predicate``, the ``"dmuon"`` section.
        predicate: ``(name, parameter) -> bool``; the same answer on every rank. Under ``zero.Init`` it
            sees parameters on the meta device, with their true shapes.
        keywords: those of ``dedicate_params`` that do not concern meshes.

    Returns:
        For ``dmuon.zero.OwnerOptimizer`` and ``dmuon.zero.attach``. A read-only mapping from name to
        owner rank.

    Raises:
        ValueError: with the same text on every rank, before anything has changed: what
            ``dedicate_params`` refuses; a setting that does not go with dedicated matrices; a model that
            went through ``deepspeed.initialize`` already; nothing left for DeepSpeed.
        ImportError: DeepSpeed is not installed.
    """
    seams.need_deepspeed()
    require_group()
    control = world_control_group()
    config, predicate, settings = together(
        control, lambda: _read(model, ds_config, predicate, keywords)
    )
    _C.agree(
        control.group_name,
        config.lines(),
        subject="have the same DeepSpeed config",
        advice="Give the same config on every rank.",
    )
    named = list(_unique(model))
    predicate = _Remembered(predicate)
    mesh = _whole_mesh(model)
    _make_whole(model, predicate, mesh)
    shard, replicate = (mesh, None) if config.stage == 3 else (None, mesh)
    front = (Stage3 if config.stage == 3 else Resident)(config, model)
    runtime = set_up(model, shard, replicate, predicate, settings, front, (config.stage,))
    runtime.settle()
    runtime.engine.show_residents()
    front.plan = plan = Plan(runtime, config, named)
    return plan


def _read(model, ds_config, predicate, keywords: dict) -> tuple[DsConfig, Predicate, Settings]:
    config = DsConfig.read(ds_config)
    config.check()
    check_supported(config)
    check_model(model)
    if predicate is not None:
        return config, predicate, _settings(keywords)
    if keywords:
        raise ValueError(
            f"dedicate_params_zero got {listed(list(keywords))} and no predicate; without one the "
            'settings are those of the "dmuon" section. Write them there.'
        )
    section = Section.read(config, model)
    section.check_used(model)
    return config, section.predicate, section.settings


def _settings(keywords: dict) -> Settings:
    known = tuple(
        k for k in Settings.__dataclass_fields__ if k not in ("allow_empty", "tp_buffer_reuse")
    )
    check_keys("dedicate_params_zero", keywords, known)
    return Settings(**keywords)


def _unique(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    seen = set()
    for name, _, _, parameter in slots(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def _whole_mesh(model: nn.Module) -> DeviceMesh:
    """All ranks, on the accelerator's devices; the model goes there, as DeepSpeed will want it."""
    device = seams.accelerator_device()
    on_device = [p for p in model.parameters() if not p.is_meta and not seams.is_partitioned(p)]
    if any(p.device != device for p in on_device):
        model.to(device)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


class _Remembered:
    """The predicate's answer by name, given once: a partitioned parameter is asked about before it is
    made whole, and must not get another answer afterwards."""

    def __init__(self, predicate: Predicate):
        self._predicate, self._answers = predicate, {}

    def __call__(self, name: str, parameter: torch.Tensor) -> bool:
        if name not in self._answers:
            self._answers[name] = bool(self._predicate(name, _as_declared(parameter)))
        return self._answers[name]


def _as_declared(parameter: torch.Tensor) -> torch.Tensor:
    """With the shape that the module declares."""
    if not seams.is_partitioned(parameter):
        return parameter
    meta = torch.empty(shape_of(parameter), dtype=parameter.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=parameter.requires_grad)


def _make_whole(model: nn.Module, predicate: _Remembered, mesh: DeviceMesh) -> None:
    """Chosen parameters that ``zero.Init`` has partitioned become ordinary ones."""
    partitioned = [
        (name, p) for name, p in _unique(model) if seams.is_partitioned(p) and predicate(name, p)
    ]
    control = control_group(mesh, tuple(range(dist.get_world_size())))
    _C.agree(
        control.group_name,
        [f"{name}\t{tuple(shape_of(p))}" for name, p in partitioned],
        subject="dedicate the same parameters",
        advice="Make the predicate a function of name, shape and dtype only.",
    )
    whole = {id(p): seams.gathered(p) for _, p in partitioned}
    for _, module, attribute, parameter in list(slots(model)):
        if id(parameter) in whole:
            module._parameters[attribute] = whole[id(parameter)]

"""Accelerate: models that its FSDP2 plugin shards (``prepare``), and models that went through fully_shard
before. What follows ``prepare`` are its own calls, which reach dmuon without any further one."""

import contextlib
from collections.abc import Mapping
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from dmuon.agreement import from_first_rank, together
from dmuon.checkpoint_directory import newest_step
from dmuon.control import clip_dedicated, no_sync
from dmuon.dedicate import dedicate_params
from dmuon.errors import check_keys
from dmuon.full_state import get_model_state_dict, set_model_state_dict
from dmuon.groups import world_control_group
from dmuon.integrations import seams
from dmuon.names import slots
from dmuon.optimizer import Muon, check_keywords
from dmuon.other_optimizers import check_optimizer
from dmuon.runtime import runtime_of
from dmuon.saving import load_checkpoint, save_checkpoint
from dmuon.set_up import Predicate


def prepare(
    accelerator,
    model: nn.Module,
    predicate: Predicate,
    *,
    dedicate: Mapping | None = None,
    **muon,
):
    """``accelerator.prepare(model, optimizer)`` under its FSDP2 plugin, with owners for the chosen matrices.

    The plugin shards as ever, with activation checkpointing, compilation and mixed precision as it is told;
    dedicated parameters are left to dmuon. Data loaders and schedulers go to ``accelerator.prepare``.

    With ``cpu_ram_efficient_loading`` the values are those of the first rank, the only one that has read
    them: it sends one tensor at a time. Without, those of each matrix's owner.

    Collective: every rank calls it.

    Args:
        accelerator: made with ``FullyShardedDataParallelPlugin(fsdp_version=2)``.
        model: not sharded, not dedicated.
        predicate: ``(name, parameter) -> bool``, as for ``dmuon.dedicate_params``.
        dedicate: further keywords of ``dmuon.dedicate_params``.
        muon: keywords of ``dmuon.Muon``, but ``param_groups``.

    Returns:
        The model, and the ``AcceleratedOptimizer`` around ``dmuon.Muon``.

    Raises:
        ValueError: on all ranks, before anything has changed: no FSDP2 plugin, float16, a mesh of
            ``parallelism_config``, a keyword that is unknown or out of range, a plugin that would wrap a
            ``ModuleList``, or what ``dedicate_params`` refuses.
    """
    dedicate = dedicate or {}
    together(world_control_group(), lambda: _check_preparable(accelerator, model, dedicate, muon))
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    if accelerator.mixed_precision != "no":
        _keep_masters(model)
    plugin = accelerator.state.fsdp_plugin
    efficient, plugin.cpu_ram_efficient_loading = plugin.cpu_ram_efficient_loading, False
    try:
        if efficient:
            values = _dedicate_on_meta(model, mesh, predicate, dedicate)
        else:
            dedicate_params(model.to(accelerator.device), mesh, predicate, **dedicate)
        model, optimizer = _shard(accelerator, model)
    finally:
        plugin.cpu_ram_efficient_loading = efficient
    if efficient:
        _materialise(model, values, accelerator.device)
    optimizer.optimizer = Muon(model, **muon)
    return model, optimizer


def _check_preparable(accelerator, model, dedicate: Mapping, muon: Mapping) -> None:
    seams.check()
    if not accelerator.is_fsdp2:
        on_cpu = (
            " (on CPUs Accelerate ignores the plugin)" if accelerator.device.type == "cpu" else ""
        )
        raise ValueError(
            f"this Accelerator runs {accelerator.distributed_type}, not FSDP2{on_cpu}. Make it with fsdp_plugin="
            "FullyShardedDataParallelPlugin(fsdp_version=2); or call dedicate_params, fully_shard and dmuon.Muon "
            "yourself, and accelerator.prepare(model, optimizer)."
        )
    _check_precision(accelerator)
    if isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        raise ValueError(
            "this FSDP2 plugin has cpu_offload, and dedicated matrices stay where their Newton-Schulz runs. Leave it "
            "out: their weights and momenta lie on one rank each."
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            "this Accelerator has a parallelism_config; prepare shards over all ranks. For hybrid sharding and "
            "tensor parallelism call dedicate_params, fully_shard and dmuon.Muon yourself."
        )
    if runtime_of(model, optional=True) is not None:
        raise ValueError(
            "dedicate_params was called on this model already. Give prepare the model as it is built: it calls "
            "dedicate_params and fully_shard."
        )
    _check_keywords(dedicate, muon)
    _check_wrapping(accelerator.state.fsdp_plugin, model)


def _check_keywords(dedicate: Mapping, muon: Mapping) -> None:
    known = tuple(
        key for key, p in signature(dedicate_params).parameters.items() if p.kind == p.KEYWORD_ONLY
    )
    check_keys("dedicate", dedicate, known)
    check_keywords("prepare", muon)
    if muon.get("param_groups") is not None:
        raise ValueError(
            "prepare got param_groups, whose parameters fully_shard is about to replace. Call dedicate_params, "
            "fully_shard and dmuon.Muon(model, param_groups=...) yourself, and accelerator.prepare(model, optimizer) "
            "without fsdp_plugin."
        )


def _check_wrapping(plugin, model: nn.Module) -> None:
    """``fully_shard`` refuses a list, and Accelerate shards embeddings by themselves a second time: both would fail
    with the matrices dedicated already."""
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    if policy is not size_based_auto_wrap_policy:
        return
    for path, module in model.named_modules():
        size = sum(p.numel() for p in module.parameters())
        if path and size > plugin.min_num_params and _cannot_be_a_unit(module):
            raise ValueError(
                f"auto_wrap_policy is 'size_based_wrap' with min_num_params={plugin.min_num_params}, and Accelerate "
                f"would give fully_shard the {type(module).__name__} {path!r} of {size} parameters: a list has no "
                "forward, and an embedding is sharded by itself. Use auto_wrap_policy='transformer_based_wrap'."
            )


def _cannot_be_a_unit(module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_list or any(isinstance(inner, nn.Embedding) for inner in module.modules())


def _check_precision(accelerator) -> None:
    if accelerator.mixed_precision == "fp16":
        raise ValueError(
            "mixed_precision is 'fp16', whose loss scaling sees only this rank's part of the gradients. Use 'bf16'."
        )


def _keep_masters(model: nn.Module) -> None:
    """As the plugin does, which would do it behind the back of dedicated parameters."""
    for p in model.parameters():
        if p.requires_grad and p.dtype != torch.float32:
            p.data = p.data.to(torch.float32)


def _dedicate_on_meta(model: nn.Module, mesh, predicate, dedicate: dict) -> dict[str, torch.Tensor]:
    """With the parameters, not the buffers, on the meta device; returns what they were, on the first rank."""
    values = dict(model.state_dict()) if dist.get_rank() == 0 else {}
    held = [(module, attribute, p) for _, module, attribute, p in slots(model)]
    made = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for _, _, p in held}
    for module, attribute, p in held:
        module._parameters[attribute] = made[id(p)]
    try:
        dedicate_params(model, mesh, predicate, **dedicate)
    except Exception:
        for module, attribute, p in held:
            module._parameters[attribute] = p
        raise
    return values


def _shard(accelerator, model):
    """By the plugin. It wants an optimizer whose parameters it can follow; ours is made of sharded ones."""
    from accelerate import Accelerator

    stand_in = torch.optim.SGD(model.parameters(), lr=0.0)
    return seams.original(Accelerator, "prepare")(accelerator, model, stand_in)


def _materialise(model: nn.Module, values: dict, device) -> None:
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items()]
    model.to_empty(device=device)
    for module, name, buffer in buffers:
        module._buffers[name] = None if buffer is None else buffer.to(device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    set_model_state_dict(model, values)


def _prepare(original, self, *args, **kwargs):
    ours = [a for a in args if seams.runtime_here(a) is not None]
    if ours and self.is_fsdp2:
        raise ValueError(
            f"this {type(ours[0]).__name__} has dedicated parameters, and this Accelerator's FSDP2 plugin would "
            "shard it by rules of its own. Give dmuon.integrations.accelerate.prepare(accelerator, model, "
            "predicate) the model as it is built; or call fully_shard yourself and make the Accelerator without "
            "fsdp_plugin."
        )
    for optimizer in (a for a in args if isinstance(a, torch.optim.Optimizer)):
        check_optimizer(optimizer)
    return original(self, *args, **kwargs)


def _prepare_model(original, self, model, device_placement=None, evaluation_mode=False):
    """Placement and reduction are FSDP2's and dmuon's: Accelerate adds autocast and compilation."""
    runtime = seams.runtime_here(model)
    if runtime is None:
        return original(self, model, device_placement, evaluation_mode)
    seams.check()
    seams.check_sharded(model, runtime)
    _check_processes(self)
    _check_precision(self)
    by_ddp = runtime.resident and runtime.replicas is None
    if by_ddp:
        return original(self, model, device_placement=False, evaluation_mode=evaluation_mode)
    return original(self, model, device_placement=False, evaluation_mode=True)


def _check_processes(accelerator) -> None:
    if accelerator.num_processes != dist.get_world_size():
        raise ValueError(
            f"Accelerate counts {accelerator.num_processes} processes, and the process group has "
            f"{dist.get_world_size()}: ranks would train on the same data. Start them with torchrun or accelerate "
            "launch, which set LOCAL_RANK; on CPUs say so: TrainingArguments(use_cpu=True), Accelerator(cpu=True)."
        )


def _no_sync(original, self, model):
    if seams.runtime_here(model) is None:
        return original(self, model)
    return no_sync(model)


def _clip_grad_norm_(original, self, parameters, max_norm, norm_type=2):
    """One norm of all gradients, instead of one for each mesh and one of what lies on this rank."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not any(map(seams.is_dedicated, given)):
        return original(self, given, max_norm, norm_type)
    return clip_dedicated(given, max_norm, norm_type, False)


def _get_state_dict(original, self, model, unwrap=True):
    """Whole tensors, on the ranks that write."""
    if seams.runtime_here(model) is None:
        return original(self, model, unwrap)
    each_node = self.project_configuration.save_on_each_node
    return get_model_state_dict(model, rank0_only=not each_node)


def _save_state(original, self, output_dir=None, *args, **kwargs):
    """dmuon's checkpoint of models with dedicated parameters, and Accelerate's of everything else."""
    pairs = _pairs(self)
    with _without(self, pairs):
        location = original(self, output_dir, *args, **kwargs)
    for i, (model, optimizer) in enumerate(pairs):
        folder = _folder(location, i)
        save_checkpoint(folder, _next_step(model, folder), model, optimizer, keep_last=1)
    return location


def _next_step(model: nn.Module, folder: Path) -> int:
    """The same folder may be saved to again: what it holds stays until the new one is whole."""
    newest = from_first_rank(seams.runtime_here(model), lambda: newest_step(folder))
    return 0 if newest is None else newest + 1


def _load_state(original, self, input_dir=None, *args, **kwargs):
    pairs = _pairs(self)
    if pairs and input_dir is None:
        input_dir = _newest_automatic(self)
    for i, (model, optimizer) in enumerate(pairs):
        load_checkpoint(_folder(input_dir, i), model, optimizer)
    with _without(self, pairs):
        return original(self, input_dir, *args, **kwargs)


def _newest_automatic(accelerator) -> Path:
    """Where ``automatic_checkpoint_naming`` has put the last one."""
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("load_state got no input_dir, and automatic_checkpoint_naming is off.")
    found = Path(accelerator.project_dir, "checkpoints").glob("checkpoint_*")
    return max(found, key=lambda path: int(path.name.rpartition("_")[2]))


def _folder(location, i: int) -> Path:
    return Path(location).expanduser() / f"dmuon_{i}"


def _pairs(accelerator) -> list[tuple[nn.Module, Muon | None]]:
    """Each model with dedicated parameters, and its optimizer if it was prepared."""
    muons = [seams.muon_of(optimizer) for optimizer in accelerator._optimizers]
    found = []
    for model in accelerator._models:
        runtime = seams.runtime_here(model)
        if runtime is not None:
            found.append((model, next((m for m in muons if m and m is runtime.optimizer()), None)))
    return found


@contextlib.contextmanager
def _without(accelerator, pairs):
    """Accelerate looks away from what dmuon saves and loads."""
    models, optimizers = accelerator._models, accelerator._optimizers
    ours = {id(part) for pair in pairs for part in pair}
    accelerator._models = [m for m in models if id(m) not in ours]
    accelerator._optimizers = [o for o in optimizers if id(seams.muon_of(o)) not in ours]
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = models, optimizers


PUBLIC = {
    "prepare": _prepare,
    "prepare_model": _prepare_model,
    "no_sync": _no_sync,
    "clip_grad_norm_": _clip_grad_norm_,
    "get_state_dict": _get_state_dict,
    "save_state": _save_state,
    "load_state": _load_state,
}

"""What DeepSpeed can do and dmuon cannot go with, each with what to do instead."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from dmuon.names import clean, slots
from dmuon.zero import seams
from dmuon.zero.config import DsConfig


@dataclass
class _Refusal:
    """What does not go with dedicated matrices."""

    what: str
    when: Callable[[DsConfig], bool]
    do: str


def _device_is(config: DsConfig, key: str, device: str) -> bool:
    return config.get("zero_optimization", key, "device") == device


def _on_cpu() -> bool:
    return seams.accelerator_name() == "cpu"


def _predivides_by_all(factor) -> bool:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return ranks > 1 and factor == ranks


_REFUSED = (
    _Refusal(
        'optimizer.type "Muon"',
        lambda c: str(c.get("optimizer", "type", default="")).lower() == "muon",
        'That is DeepSpeed\'s own Muon. Write "type": "DMuon", or drop the "dmuon" section.',
    ),
    _Refusal(
        "fp16 at stage 0",
        lambda c: c.stage == 0 and c.on("fp16", "enabled"),
        "There DeepSpeed divides gradients by a loss scale that it has not multiplied into the loss. "
        "Use stage 1, or bf16.",
    ),
    _Refusal(
        "zero_optimization.contiguous_gradients: false on a CPU",
        lambda c: (
            c.stage in (1, 2)
            and c.get("zero_optimization", "contiguous_gradients") is False
            and _on_cpu()
        ),
        "There DeepSpeed leaves out the reduction of its own gradients without a word. Drop the key.",
    ),
    _Refusal(
        "gradient_predivide_factor at stage 3, equal to the number of ranks",
        lambda c: (
            c.stage == 3 and _predivides_by_all(c.get("gradient_predivide_factor", default=1))
        ),
        "There DeepSpeed divides its own gradients by it twice. Drop the key, or give another factor.",
    ),
    _Refusal(
        "zero_optimization.round_robin_gradients",
        lambda c: c.stage in (1, 2) and c.on("zero_optimization", "round_robin_gradients"),
        "There DeepSpeed's safe_get_full_fp32_param gives one parameter the values of others, so that weights "
        "cannot be exported. Drop the key.",
    ),
    _Refusal("sparse_gradients", lambda c: c.on("sparse_gradients"), "Drop the key."),
    _Refusal("amp", lambda c: c.on("amp", "enabled"), "Use bf16."),
    _Refusal(
        "torch_autocast in float16",
        lambda c: (
            c.on("torch_autocast", "enabled")
            and c.get("torch_autocast", "dtype") in ("float16", "fp16", "torch.float16", "half")
        ),
        "Its GradScaler does not see dedicated gradients. Use bfloat16.",
    ),
    _Refusal(
        "zero_optimization.offload_optimizer to NVMe",
        lambda c: _device_is(c, "offload_optimizer", "nvme"),
        'Use "device": "cpu".',
    ),
    _Refusal(
        "zero_optimization.offload_param to NVMe",
        lambda c: _device_is(c, "offload_param", "nvme"),
        'Use "device": "cpu".',
    ),
    _Refusal(
        "zero_optimization.offload_optimizer.super_offload",
        lambda c: c.on("zero_optimization", "offload_optimizer", "super_offload"),
        "Drop the key.",
    ),
    _Refusal(
        "zero_optimization.offload_optimizer.ratio below 1",
        lambda c: c.get("zero_optimization", "offload_optimizer", "ratio", default=1) != 1,
        "There DeepSpeed takes its own CPU Adam and no other optimizer. Drop the key.",
    ),
    _Refusal(
        "zero_optimization.zenflow",
        lambda c: c.get("zero_optimization", "zenflow") is not None,
        "Drop the section.",
    ),
    _Refusal(
        "zero_optimization.elastic_checkpoint",
        lambda c: c.on("zero_optimization", "elastic_checkpoint"),
        "Drop the key: dedicated matrices load at any world size without it.",
    ),
    _Refusal(
        "zero_optimization.mics_shard_size",
        lambda c: (c.get("zero_optimization", "mics_shard_size") or -1) > 0,
        "Use zero_hpz_partition_size.",
    ),
    _Refusal("compile.deepcompile", lambda c: c.on("compile", "deepcompile"), "Drop the section."),
    _Refusal("hybrid_engine", lambda c: c.on("hybrid_engine", "enabled"), "Drop the section."),
    _Refusal("eigenvalue", lambda c: c.on("eigenvalue", "enabled"), "Drop the section."),
    _Refusal(
        "quantize_training", lambda c: c.on("quantize_training", "enabled"), "Drop the section."
    ),
    _Refusal(
        "tensor_parallel",
        lambda c: (c.get("tensor_parallel", "autotp_size") or 0) > 1,
        "Tensor parallelism is not supported under ZeRO; use dedicate_params or replicate_tp.",
    ),
    _Refusal(
        "sequence parallelism",
        lambda c: (c.get("sequence_parallel_size") or 1) > 1,
        "Set sequence_parallel_size to 1.",
    ),
    _Refusal(
        "data_types.buffer_dtype",
        lambda c: c.get("data_types", "buffer_dtype") is not None,
        "It would cast dedicated weights, which DeepSpeed takes for buffers. Drop the key.",
    ),
)


def check_supported(config: DsConfig) -> None:
    """Raises ValueError naming the first setting that dmuon cannot go with, and what to do."""
    for refusal in _REFUSED:
        if refusal.when(config):
            raise ValueError(
                f"the DeepSpeed config asks for {refusal.what}, which does not go with dedicated "
                f"matrices. {refusal.do}"
            )


def check_model(model: nn.Module) -> None:
    """Raises ValueError where the model is of a kind that dmuon cannot take under ZeRO."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if seams.is_pipeline(model):
        raise ValueError(
            "the model is a PipelineModule, whose stages train other weights. Pipeline parallelism is "
            "not supported under ZeRO."
        )
    for name, _, _, parameter in slots(model):
        if getattr(parameter, "use_muon", False):
            raise ValueError(
                f"parameter {name!r} is tagged use_muon, so DeepSpeed's own Muon would orthogonalise it as "
                f"well. Remove the tag (del parameter.use_muon)."
            )
        if getattr(parameter, "allreduce", True) is False:
            raise ValueError(
                f"parameter {clean(name)!r} is an expert of DeepSpeed's MoE, reduced over a group of its "
                "own. Expert parallelism is not supported; leave MoE layers of DeepSpeed out."
            )

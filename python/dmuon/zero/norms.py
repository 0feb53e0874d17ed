"""The norm of dedicated gradients in DeepSpeed's: one wrapped method for each kind of optimizer it has."""

import math

import torch

from dmuon.zero import seams


def install(engine, attached) -> None:
    """The norm of dedicated gradients joins DeepSpeed's, so that clipping, skipping and the reported norm are
    of all gradients."""
    for kind, wrap_kind in _kinds().items():
        if type(engine.optimizer) is kind:
            wrap_kind(engine, attached)
            return
    raise RuntimeError(
        f"DeepSpeed's optimizer is a {type(engine.optimizer).__name__}, which dmuon does not know. Known: "
        f"{', '.join(kind.__name__ for kind in _kinds())}. Drop what asks for it from the config."
    )


def _kinds() -> dict:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from dmuon.zero.optimizer import OwnerOptimizer

    return {
        OwnerOptimizer: _stage_0,
        FP16_UnfusedOptimizer: _stage_0_16bit,
        BF16_Optimizer: _bf16_optimizer,
        DeepSpeedZeroOptimizer: _stages_1_and_2,
        DeepSpeedZeroOptimizer_Stage3: _stage_3,
    }


def _stage_0(engine, attached) -> None:
    def make(original):
        def clip_fp32_gradients():
            attached.clip_all()

        return clip_fp32_gradients

    seams.wrap(engine, "clip_fp32_gradients", "", make)


def _stage_0_16bit(engine, attached) -> None:
    optimizer = engine.optimizer

    def make_check(original):
        def check(param_groups=None):
            managed = original(param_groups)  # on every rank, with its collectives
            return managed or not math.isfinite(attached.norm())

        return check

    def make_clip(original):
        def unscale_and_clip_grads(total_norm, apply_scale=True):
            optimizer._global_grad_norm = attached.combined(total_norm)
            return original(optimizer._global_grad_norm, apply_scale)

        return unscale_and_clip_grads

    seams.wrap(optimizer.overflow_checker, "check", "param_groups", make_check)
    seams.wrap(optimizer, "unscale_and_clip_grads", "total_norm, apply_scale", make_clip)


def _bf16_optimizer(engine, attached) -> None:
    def make(original):
        def get_grads_for_norm(for_clipping=False):
            given = original(for_clipping)
            if for_clipping:
                return given
            dense, expert = given
            norm = torch.tensor([attached.norm()], dtype=torch.float32, device=engine.device)
            return [*dense, norm], expert

        return get_grads_for_norm

    seams.wrap(engine.optimizer, "get_grads_for_norm", "for_clipping", make)


def _stages_1_and_2(engine, attached) -> None:
    optimizer = engine.optimizer

    def make_norm(original):
        def scaled_global_norm(norm_type=2):
            return attached.combined(original(norm_type))

        return scaled_global_norm

    def make_overflow(original):
        def has_overflow(partition_gradients=True):
            managed = original(partition_gradients)
            return managed or not math.isfinite(attached.norm())

        return has_overflow

    seams.wrap(optimizer, "scaled_global_norm", "norm_type", make_norm)
    if not optimizer.compute_grad_norm:  # nobody asks for a norm
        seams.wrap(optimizer, "has_overflow", "partition_gradients", make_overflow)


def _stage_3(engine, attached) -> None:
    optimizer = engine.optimizer

    def make(original):
        def _get_norm_groups():
            groups = original()
            total = math.sqrt(sum(float(g) ** 2 for g in groups))
            invalid = any(not float(g) >= 0 for g in groups)
            attached.note_total(math.inf if invalid else total)
            norm = attached.norm()
            device = next((g.device for g in groups if torch.is_tensor(g)), None)
            # DeepSpeed's mark of a norm that is not finite is -1.
            norm = norm if math.isfinite(norm) else -1.0
            return [*groups, torch.tensor(norm, dtype=torch.float32, device=device)]

        return _get_norm_groups

    seams.wrap(optimizer, "_get_norm_groups", "", make)

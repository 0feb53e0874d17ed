"""What ``set_up`` and the runtime ask about DeepSpeed."""

import contextlib
import weakref

import torch
import torch.distributed as dist
from torch import nn

from dmuon import _C
from dmuon.errors import listed
from dmuon.runtime import Runtime
from dmuon.zero import seams
from dmuon.zero.config import DsConfig
from dmuon.zero.section import shape_of
from dmuon.zero.states import ZeroStates


class Front:
    """At any stage."""

    resident: bool
    plan = None  # the Plan, once it is made

    def __init__(self, config: DsConfig, model: nn.Module):
        self._config, self._model = config, weakref.ref(model)

    def check_axes(self, axes, chosen) -> None:
        frozen = [c.name for c in chosen if not c.parameter.requires_grad]
        if frozen and len(frozen) == len(chosen):
            raise ValueError(
                f"all chosen parameters are frozen: {listed(frozen)}. Choose trainable ones."
            )
        taken = {id(c.parameter) for c in chosen}
        if not any(p.requires_grad and id(p) not in taken for p in self._model().parameters()):
            raise ValueError(
                "every trainable parameter is dedicated, and DeepSpeed does not run with nothing to train. "
                "Leave one out that AdamW may train: an embedding, a norm, a bias, one of LoRA's matrices."
            )

    def before_adopting(self, runtime: Runtime) -> None:
        """Initial values are rank 0's; then the parameters move among the buffers."""
        for param in runtime.params:
            value = param.parameter.detach()
            first = value.contiguous()
            if first.numel() and not first.is_meta:
                dist.broadcast(first, src=0)
                value.copy_(first)
            for slot in param.slots:
                slot.hide()

    def settle(self, runtime: Runtime) -> None:
        for param in runtime.params:
            unit = runtime.adapter.unit(runtime.engine.unit_of(param.index))
            compute = self._config.compute_dtype or param.dtype
            unit.compute_dtype = param.policy.param_dtype or compute
            reduce = param.policy.grad_dtype or self._config.reduce_dtype or unit.compute_dtype
            unit.reduce_dtype = torch.float32 if reduce == torch.float64 else reduce

    def no_sync(self):
        """DeepSpeed's own, which knows no nesting."""
        stage, attached = self._config.stage, self.plan.attached
        if attached is None:
            raise ValueError("no_sync before dmuon.zero.attach(engine, plan). Call attach first.")
        if stage >= 2:
            raise ValueError(
                f"at ZeRO stage {stage} DeepSpeed reduces every micro-batch, so there is no no_sync. Set "
                '"gradient_accumulation_steps" in its config, or use engine.coalesce_grad_reduction().'
            )
        inside = attached.engine.inside_no_sync_ctxt
        return contextlib.nullcontext() if inside else attached.engine.no_sync()

    def summarize_groups(self) -> list[dict]:
        optimizer = self.plan.optimizer()
        if optimizer is None:
            raise ValueError("this model has no OwnerOptimizer yet. Call dmuon.zero.initialize.")
        return optimizer.summarize_groups()

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """Of a parameter or buffer that DeepSpeed keeps, with the dtype the model had. Collective."""
        if not isinstance(value, nn.Parameter):
            return value
        attached = self.plan.attached
        if attached is None:  # not DeepSpeed's yet, but for zero.Init
            return seams.gathered(value) if seams.is_partitioned(value) else value
        return attached.partitions.full_fp32(value).to(self._dtype(value))

    def _dtype(self, value: torch.Tensor) -> torch.dtype:
        return self.plan.dtypes.get(id(value), value.dtype)

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """On the meta device: what ``whole`` gives."""
        return torch.empty(shape_of(value), dtype=self._dtype(value), device="meta")

    def assign(self, mine: torch.Tensor, value: torch.Tensor) -> None:
        """A whole tensor into what DeepSpeed keeps: what computes, and what its optimizer has. Collective."""
        attached = self.plan.attached
        if attached is None:
            seams.assign(mine, value)
        else:
            attached.partitions.assign(mine, value)

    def states(self, runtime: Runtime) -> ZeroStates:
        return ZeroStates(self.plan.attached)

    @staticmethod
    def check_slot(param) -> None:
        """The runtime's own error says what to do."""

    @staticmethod
    def check_complete(runtime: Runtime) -> None:
        raise ValueError(
            "this model was prepared for DeepSpeed by dedicate_params_zero. Its optimizer is "
            "dmuon.zero.OwnerOptimizer(params, plan=plan), given to deepspeed.initialize; or call "
            "dmuon.zero.initialize(model=..., config=...)."
        )

    def make_adapter(self, units: int, ranks: int) -> "_C.ZeroAdapter":
        residency = _C.Residency.resident if self.resident else _C.Residency.transient
        return _C.ZeroAdapter(
            units, residency, 1.0 if self._config.sums_gradients else float(ranks)
        )


class Resident(Front):
    """Stages 0, 1 and 2."""

    resident = True


class Stage3(Front):
    resident = False

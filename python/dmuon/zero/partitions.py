"""DeepSpeed's float32 weights of what it trains, and AdamW's states of them: whole, one parameter at a time.

Each kind of its optimizers has them elsewhere. Stage 0: a tensor per parameter. Stages 1 and 2: this rank's part of
a group, in which parameters lie one behind the other, in one tensor. Stage 3: this rank's part of each parameter,
those of a group, or of a part of it, in one tensor.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dmuon.zero import seams

MOMENTS = ("exp_avg", "exp_avg_sq")
_HELPERS = (
    "safe_get_full_fp32_param",
    "safe_set_full_fp32_param",
    "safe_set_local_fp32_param",
    "safe_get_full_optimizer_state",
    "safe_set_full_optimizer_state",
    "safe_set_local_optimizer_state",
    "lazy_init_hp_params_optimizer_state",
)


class Kept:
    """Parameters that AdamW steps as one tensor, and with one count of steps; at stage 0 it is one parameter."""

    def __init__(self, members: list[torch.Tensor], master: torch.Tensor, optimizer):
        self.members, self._master, self._optimizer = members, master, optimizer

    def _entry(self) -> dict:
        return self._optimizer.state.get(self._master) or {}

    @property
    def step(self) -> float:
        """How many steps AdamW has done. The same on every rank."""
        return float(self._entry().get("step", 0))

    @property
    def is_copy(self) -> bool:
        """Whether the float32 weights are not those that compute."""
        return self._master is not self.members[0]

    def set_step(self, step: torch.Tensor) -> None:
        self._entry()["step"] = step.detach().to("cpu", torch.float32, copy=True).view(())

    def restart(self, make: bool) -> None:
        """As before the first step. AdamW makes its state then; ``make``: now, where there is none yet."""
        master, entry = self._master.detach(), self._entry()
        if not entry and make:
            entry = {key: torch.zeros_like(master) for key in MOMENTS}
            self._optimizer.state[self._master] = entry
        if entry:
            for key in MOMENTS:
                entry[key].zero_()
            self.set_step(torch.zeros(()))

    def get(self, parameter: torch.Tensor, key: str | None = None) -> torch.Tensor:
        """A copy of its float32 weight, or of its state of that name, whole. Collective."""
        return self._tensor(key).detach().clone()

    def set(self, parameter: torch.Tensor, value: torch.Tensor, key: str | None = None) -> None:
        """Every rank gives the whole value. Not the weight that computes: ``seams.assign``."""
        self._tensor(key).data.copy_(value)

    def _tensor(self, key: str | None) -> torch.Tensor:
        return self._master if key is None else self._entry()[key]


class _InGroups(Kept):
    """Stages 1 and 2. DeepSpeed finds a state by what it notes after its first step, and forgets when it loads."""

    def get(self, parameter, key=None):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if key is None:
            return safe_get_full_fp32_param(parameter)
        self._link(parameter)
        return safe_get_full_optimizer_state(parameter, key)

    def set(self, parameter, value, key=None):
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if key is None:
            safe_set_full_fp32_param(parameter, value)
            return
        self._link(parameter)
        safe_set_full_optimizer_state(parameter, value, key)

    def _link(self, parameter) -> None:
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        lazy_init_hp_params_optimizer_state([parameter], self._master, self._optimizer.state)


class _InParameters(Kept):
    """Stage 3. DeepSpeed's setters of whole values do not take a parameter that the ranks cannot share evenly."""

    def get(self, parameter, key=None):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        with _as_trained(parameter):
            if key is None:
                return safe_get_full_fp32_param(parameter)
            return safe_get_full_optimizer_state(parameter, key)

    def set(self, parameter, value, key=None):
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        mine = self._my_part(parameter, value)
        with _as_trained(parameter):
            if key is None:
                safe_set_local_fp32_param(parameter, mine)
            else:
                safe_set_local_optimizer_state(parameter, mine, key)

    @staticmethod
    def _my_part(parameter, value: torch.Tensor) -> torch.Tensor:
        """Equal on all ranks, with zeros behind the last element."""
        length = parameter.ds_tensor.numel()
        start = length * dist.get_rank(parameter.ds_process_group)
        mine = value.detach().flatten()[start : start + length]
        return F.pad(mine, (0, length - mine.numel()))


@contextlib.contextmanager
def _as_trained(parameter: torch.Tensor):
    """What has been frozen since is DeepSpeed's still, but its helpers pass over it without a word."""
    trained = parameter.requires_grad
    parameter.requires_grad = True
    try:
        yield
    finally:
        parameter.requires_grad = trained


class Partitions:
    """All that DeepSpeed trains, of one engine."""

    def __init__(self, engine, optimizer):
        """Raises RuntimeError where this DeepSpeed has them elsewhere."""
        import deepspeed

        for name in _HELPERS:
            if not callable(getattr(deepspeed.utils, name, None)):
                seams.refuse(deepspeed.utils, name, "()", "is missing")
        self.kept = _kept(engine, optimizer)
        self._of = {id(p): kept for kept in self.kept for p in kept.members}

    def of(self, parameter: torch.Tensor) -> Kept | None:
        """None of what DeepSpeed does not train."""
        return self._of.get(id(parameter))

    def full_fp32(self, parameter: torch.Tensor) -> torch.Tensor:
        """A whole weight of DeepSpeed's, as its optimizer has it. Collective."""
        kept = self.of(parameter)
        return (seams.whole(parameter) if kept is None else kept.get(parameter)).float()

    def assign(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """A new whole weight: its optimizer's, and the one that computes. Collective."""
        kept = self.of(parameter)
        if kept is not None:
            kept.set(parameter, value)
        seams.assign(parameter, value)


def _kept(engine, optimizer) -> list[Kept]:
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    theirs = engine.optimizer
    if theirs is optimizer:  # stage 0 in the dtype of the model
        return [Kept([p], p, optimizer) for g in optimizer.param_groups for p in g["params"]]
    if isinstance(theirs, FP16_UnfusedOptimizer):  # stage 0 in 16 bits
        low, high = _lists(theirs, "fp16_groups"), _lists(theirs, "fp32_groups")
        pairs = [
            pair for groups in zip(low, high, strict=True) for pair in zip(*groups, strict=True)
        ]
        return [Kept([p], master, optimizer) for p, master in pairs]
    kind, members, masters = {
        BF16_Optimizer: (_InGroups, "bf16_groups", "fp32_groups_flat_partition"),
        DeepSpeedZeroOptimizer: (_InGroups, "bit16_groups", "single_partition_of_fp32_groups"),
        DeepSpeedZeroOptimizer_Stage3: (
            _InParameters,
            "fp16_groups",
            "fp32_partitioned_groups_flat",
        ),
    }[type(theirs)]
    groups = zip(_lists(theirs, members), _lists(theirs, masters), strict=True)
    return [kind(list(low), master, optimizer) for low, master in groups]


def _lists(theirs, name: str) -> list:
    found = getattr(theirs, name, None)
    if not isinstance(found, list):
        seams.refuse(theirs, name, "", "is missing")
    return found

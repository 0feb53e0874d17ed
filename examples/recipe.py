"""What a run trains, and with which numbers: one value for the run and for its check."""

import math
from dataclasses import dataclass, field

import torch
from gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Recipe:
    optimizer: str  # "dmuon": Muon for the matrices inside the blocks, AdamW for the rest; "adamw"
    lr: float  # Muon's
    adamw_lr: float
    steps: int = 110
    batch: int = 16  # sequences in a global batch
    seed: int = 0
    model: GPTConfig = field(default_factory=GPTConfig)
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    warmup_steps: int = 10

    @property
    def context(self) -> int:
        return self.model.context

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, times a cosine down to a tenth."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return warmup * (0.55 + 0.45 * math.cos(math.pi * step / self.steps))

    def initial_model(self) -> GPT:
        """The same weights on every rank, and in one process."""
        torch.manual_seed(self.seed)
        return GPT(self.model)


# Each optimizer's best of a grid in one process. Validation loss after 110 steps, seed 0:
#   Muon lr, with adamw_lr 0.001:  0.01 2.103    0.02 2.041
#   Muon lr, with adamw_lr 0.003:  0.01 2.115    0.02 2.028   0.04 2.389
#   AdamW lr, 10 warm-up steps:    0.0007 2.426   0.001 2.421   0.0014 2.412
#   AdamW lr, 30 warm-up steps:    0.002 2.406    0.003 2.407
TUNED = {
    "dmuon": Recipe("dmuon", lr=0.02, adamw_lr=0.003),
    "adamw": Recipe("adamw", lr=0.0, adamw_lr=0.002, warmup_steps=30),
}

"""What a run trains, and with which numbers: one value for the run and for its check."""

import math
from dataclasses import dataclass

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
    model: GPTConfig = GPTConfig()
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


TUNED = {
    "dmuon": Recipe("dmuon", lr=0.01, adamw_lr=0.003),
    "adamw": Recipe("adamw", lr=0.0, adamw_lr=0.001),
}

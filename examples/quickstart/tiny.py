"""A model and a task small enough for a laptop: learn a permutation of 64 tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, ROWS = 64, 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.gelu(self.up_proj(self.norm(x))))


class Tiny(nn.Module):
    """Maps tokens and what they stand for, both ``[rows]``, to the mean loss in nats."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same weights on every rank
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), targets)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """What Muon trains: the matrices inside the blocks. Embedding, head and norms are AdamW's."""
    return "_proj" in name and parameter.ndim == 2


def batch(step: int, index: int = 0, count: int = 1) -> tuple[Tensor, Tensor]:
    """One data-parallel rank's rows, ``index`` of ``count``, of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return tokens.chunk(count)[index], ((7 * tokens + 3) % VOCABULARY).chunk(count)[index]


def show(step: int, loss: Tensor) -> None:
    """Prints the mean over all ranks. Every rank calls it."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {mean.item():.4f}", flush=True)

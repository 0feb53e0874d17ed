"""The models that the figures are measured on."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block of four matrices, without biases.

    The rows of ``qkv`` that belong to one head are neighbours, so that a shard of it has whole heads.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.transpose(1, 2).unbind(-2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT over bytes; ``units`` are what FSDP2 and dmuon take as units.

    Embeddings and head are named as DeepSpeed's Muon wants it, which leaves those to AdamW.
    """

    def __init__(
        self, width: int, layers: int, context: int, heads: int = 4, vocabulary: int = 256
    ):
        super().__init__()
        self.token_embed = nn.Embedding(vocabulary, width)
        self.position_embed = nn.Embedding(context, width)
        self.units = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy."""
        x = self.token_embed(tokens) + self.position_embed.weight[: tokens.shape[1]]
        for unit in self.units:
            x = unit(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Unit(nn.Module):
    """A chain of ``count`` square matrices and, where the runtime shall have a share, one bias."""

    def __init__(self, count: int, size: int, bias: bool = True):
        super().__init__()
        self.matrices = nn.ParameterList(torch.eye(size) for _ in range(count))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x.mm(matrix)
        return x if self.bias is None else x + self.bias


class Chain(nn.Module):
    """Units in a row: as little arithmetic around the matrices as there can be."""

    def __init__(self, units: int, matrices: int, size: int, bias: bool = True):
        super().__init__()
        self.units = nn.ModuleList(Unit(matrices, size, bias) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def is_block_matrix(name: str, parameter: Tensor) -> bool:
    """The predicate of all figures: what a unit holds, except vectors."""
    return name.startswith("units.") and parameter.ndim == 2


def block_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if is_block_matrix(n, p)}


def text_batch(
    seed: int, sequences: int, context: int, vocabulary: int = 256
) -> tuple[Tensor, Tensor]:
    """Tokens and targets that can be learnt: the next one is a fixed function of the last."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, context), generator=generator)
    return tokens, (7 * tokens + 3) % vocabulary

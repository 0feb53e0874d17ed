"""A small byte-level GPT, written as plain PyTorch: nothing here knows how it is trained."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    context: int = 128
    layers: int = 4
    width: int = 256
    heads: int = 4
    vocab: int = 256  # one token per byte value


class Attention(nn.Module):
    """Has as many heads as its projections have outputs: all, or a tensor-parallel rank's share."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_width = config.width // config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width, bias=False)
        self.proj = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Maps tokens ``[batch, length]`` and the tokens that follow them to the mean loss in nats."""

    def __init__(self, config: GPTConfig = GPTConfig()):
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self._initialize(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def _initialize(self, config: GPTConfig) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            # GPT-2's rule: the sum over all residual branches keeps its size at any depth.
            if name.endswith(("o_proj.weight", "mlp.proj.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Muon's share of a GPT: the matrices inside the blocks; embeddings and head are AdamW's."""
    return parameter.ndim == 2 and name.startswith("blocks.")

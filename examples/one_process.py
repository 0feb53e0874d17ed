"""The same training in one process and plain PyTorch: a distributed run must come out equal."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Corpus
from gpt import is_hidden_matrix
from recipe import Recipe
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

# Relative, of each parameter's norm, where the mathematics does not amplify rounding further.
TOLERANCE = 2e-6
ORDERS = (2, 4, 8, 16)  # slices of the batch: the same sum, each in its own order

# (a, b, c) of each iteration: Polar Express, arXiv:2505.16932, as in Dao-AILab/gram-newton-schulz.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
SAFETY = 1.05  # the coefficients are for singular values up to 1.05 times too large


def newton_schulz(x: Tensor) -> Tensor:
    """Moves the singular values of ``[m, n]`` close to 1, in five iterations."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = F.normalize(x / x.abs().max().clamp_min(1e-38), dim=(0, 1))
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.T
        polynomial = b / SAFETY**3 * gram + c / SAFETY**5 * gram @ gram
        x = a / SAFETY * x + polynomial @ x
    return x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled to the size of AdamW's updates."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, weight: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer = state["momentum_buffer"].mul_(momentum).add_(weight.grad)
        update = newton_schulz(weight.grad + momentum * buffer)
        weight.mul_(1 - lr * weight_decay)
        weight.sub_(lr * 0.2 * max(weight.shape) ** 0.5 * update)


def make_optimizers(recipe: Recipe, model: nn.Module) -> list[torch.optim.Optimizer]:
    muon, rest = [], []
    for name, parameter in model.named_parameters():
        dedicated = recipe.optimizer == "dmuon" and is_hidden_matrix(name, parameter)
        (muon if dedicated else rest).append(parameter)
    adamw = AdamW(rest, lr=recipe.adamw_lr, betas=recipe.betas, weight_decay=recipe.weight_decay)
    return [adamw] + ([Muon(muon, recipe.lr, recipe.momentum, recipe.weight_decay)] if muon else [])


def train(recipe: Recipe, corpus: Corpus, steps: int, slices: int = 1) -> nn.Module:
    """The first steps of a run.

    Args:
        slices: compute the gradient of each batch in this many parts and add them up: the same
            sum in another order, as a world of that size does.
    """
    model = recipe.initial_model()
    for _ in take_steps(model, recipe, corpus, steps, slices):
        pass
    return model


def losses(recipe: Recipe, corpus: Corpus, slices: int = 1) -> list[float]:
    """Of each batch of a whole run, before its step."""
    return list(take_steps(recipe.initial_model(), recipe, corpus, recipe.steps, slices))


def take_steps(
    model: nn.Module, recipe: Recipe, corpus: Corpus, steps: int, slices: int
) -> Iterator[float]:
    optimizers = make_optimizers(recipe, model)
    schedulers = [LambdaLR(optimizer, recipe.lr_factor) for optimizer in optimizers]
    for step in range(steps):
        tokens, targets = corpus.batch(recipe.seed, step, recipe.batch, recipe.context)
        model.zero_grad()
        loss = 0.0
        for part in zip(tokens.chunk(slices), targets.chunk(slices)):
            share = model(*part) / slices
            share.backward()
            loss += share.item()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for each in optimizers + schedulers:
            each.step()
        yield loss


def check(
    recipe: Recipe,
    corpus: Corpus,
    steps: int,
    folder: Path,
    world_size: int,
    *,
    judged: bool = True,
) -> None:
    """Compares weights that `world_size` ranks have trained and saved with training in one process.

    Args:
        judged: False where Newton-Schulz iterates in half precision, as on a GPU: only prints.

    Raises:
        SystemExit: they differ by more than rounding explains: more than `TOLERANCE`, and more
            than twice what adding the gradients in other orders does in one process.
    """
    expected = weights_of(train(recipe, corpus, steps))
    weights = torch.load(weights_file(folder, recipe))
    difference, name = largest_difference(weights, expected)
    control = max(
        largest_difference(weights_of(train(recipe, corpus, steps, slices)), expected)[0]
        for slices in ORDERS
    )
    bound = max(TOLERANCE, 2 * control)
    print(
        f"{recipe.optimizer} after {steps} steps: {world_size} processes differ from one by "
        f"{difference:.1e} at most (relative, in {name}); tolerance {bound:.1e}: {TOLERANCE:.0e}, "
        f"or twice what adding the gradients in other orders does in one process ({control:.1e})"
    )
    if judged and not difference <= bound:
        raise SystemExit("The distributed run does not equal training in one process.")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def largest_difference(
    weights: dict[str, Tensor], expected: dict[str, Tensor]
) -> tuple[float, str]:
    """The largest relative difference over all parameters, and the parameter that has it."""
    missing, extra = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing or extra:
        raise ValueError(f"the saved weights lack {sorted(missing)}, and have too {sorted(extra)}")
    return max((relative_difference(weights[name], expected[name]), name) for name in expected)


def relative_difference(got: Tensor, want: Tensor) -> float:
    difference = float((got - want).norm() / want.norm())
    return float("inf") if math.isnan(difference) else difference


def weights_file(folder: Path, recipe: Recipe) -> Path:
    return folder / f"{recipe.optimizer}.pt"

"""Parameters after training on four ranks against the same mathematics in one process.

The one process is written in plain torch below: Newton-Schulz, in its Gram form and direct,
momentum, and torch's AdamW. How far it moves from itself when it sums the four slices of a batch in
another order says what difference the mathematics itself makes of rounding: twice that is allowed
where it is more than the limit. A difference is relative to the parameter's largest element.
"""

from collections.abc import Callable
from functools import partial

import dmuon
import torch
import torch.distributed as dist
from models import Gpt, is_block_matrix, text_batch
from support import Figure, cpu_mesh, run_ranks, shard
from torch import Tensor, nn

WORLD_SIZE = 4
WIDTH, LAYERS, CONTEXT, VOCABULARY, SEQUENCES = 64, 2, 32, 64, 4
LIMITS = {1: 5e-7, 20: 2e-6}  # by number of steps
LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)

# Before which iterations the Gram matrix is made anew from the iterate: direct is before all.
RESTARTS = {"gram": (2,), "direct": (1, 2, 3, 4)}

Parameters = dict[str, Tensor]
Trained = dict[int, Parameters]  # by number of steps


def measure() -> list[Figure]:
    return run_ranks(compare, WORLD_SIZE)[0]


def compare() -> list[Figure]:
    ours = {form: train_ranks(ns_backend=form) for form in RESTARTS}
    unpacked = train_ranks(ns_backend="gram", pack_small_params=False)
    if dist.get_rank() != 0:
        return []
    exact = train_single(torch.float64, "direct", order=(0, 1, 2, 3))
    return [
        *(figure for form in RESTARTS for figure in compare_form(form, ours[form], exact)),
        bitwise("packed and unpacked: elements that differ", ours["gram"], unpacked),
    ]


def compare_form(form: str, ours: Trained, exact: Trained) -> list[Figure]:
    single = train_single(torch.float32, form, order=(0, 1, 2, 3))
    reordered = train_single(torch.float32, form, order=(2, 0, 3, 1))
    figures = []
    for steps, limit in LIMITS.items():
        name = f"parity, {form}, {steps} step{'s' * (steps > 1)}"
        rounding = difference(reordered[steps], single[steps])
        error = difference(single[steps], exact[steps])
        here, there = (difference(ours[steps], other[steps]) for other in (single, exact))
        figures += [
            Figure(f"{name}: against float32", here, max(limit, 2 * rounding)),
            Figure(f"{name}: against float64", there, max(limit, 2 * error)),
            Figure("  plain torch: float32 summed in another order", rounding),
            Figure("  plain torch: float32 against float64", error),
        ]
    return figures


def difference(some: Parameters, other: Parameters) -> float:
    def relative(a: Tensor, b: Tensor) -> float:
        return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()

    return max(relative(some[name], other[name]) for name in other)


def bitwise(name: str, some: Trained, other: Trained) -> Figure:
    last = max(LIMITS)
    count = sum((some[last][n] != other[last][n]).sum().item() for n in other[last])
    return Figure(name, count, 0)


def initial_model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(WIDTH, LAYERS, CONTEXT, vocabulary=VOCABULARY)


def slice_of_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return text_batch(step * WORLD_SIZE + rank, SEQUENCES, CONTEXT, VOCABULARY)


def train_ranks(pack_small_params: bool = True, **muon) -> Trained:
    """All parameters at the numbers of steps that have a limit; meaningful on rank 0."""
    model = initial_model()
    dmuon.dedicate_params(model, cpu_mesh(), is_block_matrix, pack_small_params=pack_small_params)
    shard(model, model.units, cpu_mesh())
    optimizer = dmuon.Muon(
        model,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        **{f"adamw_{key}": value for key, value in ADAMW.items()},
        **muon,
    )
    trained = {}
    for step in range(1, max(LIMITS) + 1):
        model(*slice_of_batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in LIMITS:
            trained[step] = whole_parameters(model)
    return trained


def whole_parameters(model) -> Parameters:
    owned = {
        p.fqn: p._owned_data.clone()
        for p in dmuon.get_owned_params(model, dist.get_rank())
        if p.is_owner
    }
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, owned)
    symmetric = {n: p for n, p in model.named_parameters() if not is_block_matrix(n, p)}
    whole = {name: parameter.full_tensor().detach() for name, parameter in symmetric.items()}
    return whole | {name: tensor for part in parts for name, tensor in part.items()}


def train_single(dtype: torch.dtype, form: str, order: tuple[int, ...]) -> Trained:
    return train_by(partial(muon, restarts=RESTARTS[form]), dtype, order)


def train_by(
    rule: Callable, dtype: torch.dtype, order: tuple[int, ...], clip: float = 0.0
) -> Trained:
    """In one process, with ``rule(matrices, momentum_buffers)`` as the step of the blocks' matrices."""
    model = initial_model().to(dtype)
    matrices = [p for n, p in model.named_parameters() if is_block_matrix(n, p)]
    rest = [p for n, p in model.named_parameters() if not is_block_matrix(n, p)]
    buffers = [torch.zeros_like(p) for p in matrices]
    adamw = torch.optim.AdamW(rest, **ADAMW)
    trained = {}
    for step in range(1, max(LIMITS) + 1):
        for rank in order:
            (model(*slice_of_batch(step, rank)) / len(order)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        rule(matrices, buffers)
        adamw.step()
        model.zero_grad()
        if step in LIMITS:
            trained[step] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trained


@torch.no_grad()
def muon(matrices: list[Tensor], buffers: list[Tensor], restarts: tuple[int, ...]) -> None:
    for weight, buffer in zip(matrices, buffers):
        buffer.mul_(MOMENTUM).add_(weight.grad)
        update = orthogonalize(weight.grad + MOMENTUM * buffer, restarts)
        weight.mul_(1 - LR * DECAY)
        weight.sub_(update, alpha=LR * 0.2 * max(weight.shape) ** 0.5)


def orthogonalize(matrix: Tensor, restarts: tuple[int, ...]) -> Tensor:
    """Newton-Schulz with the coefficients of arXiv:2505.16932, divided by its safety factor."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalize(matrix.T, restarts).T
    x = matrix / matrix.norm()
    one = torch.eye(len(x), dtype=x.dtype)
    gram, product = x @ x.T, one
    for step, (a, b, c) in enumerate(POLAR_EXPRESS):
        if step in restarts:
            x = product @ x
            gram, product = x @ x.T, one
        factor = a / 1.05 * one + b / 1.05**3 * gram + c / 1.05**5 * gram @ gram
        gram, product = factor @ gram @ factor, factor @ product
    return product @ x

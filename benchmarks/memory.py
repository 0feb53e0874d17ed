"""Bytes that a rank holds between steps, counted from storages.

Three equal matrices on four ranks, so that one rank owns none. Counted twice: what can be reached
from the model and the optimizer, and what torch's CPU allocator handed out from before the model was
built until now and did not get back. The second sees what the engine holds out of reach.
"""

import gc
from collections.abc import Iterable, Iterator

import dmuon
import torch
from models import Chain, block_matrices, is_block_matrix
from support import Figure, cpu_mesh, run_ranks, shard
from torch import Tensor

WORLD_SIZE, UNITS, SIZE = 4, 3, 256
MATRIX = SIZE * SIZE * 4
SIDES = ("nobody", "fsdp2", "dmuon")


def measure() -> list[Figure]:
    ranks = {side: run_ranks(held, WORLD_SIZE, side) for side in SIDES}
    rest = [live for _, live, _ in ranks["nobody"]]  # activations kept, biases, their AdamW state
    live = {s: [held[1] - base for held, base in zip(ranks[s], rest)] for s in ("fsdp2", "dmuon")}
    reachable = [held[0] for held in ranks["dmuon"]]
    owns = [held[2] for held in ranks["dmuon"]]
    bystander = owns.index(0)
    return [
        Figure("memory: a rank that owns nothing, in matrices", live["dmuon"][bystander] / MATRIX, 0.02),
        Figure("  reachable from its parameters and states", reachable[bystander] / MATRIX, 0.02),
        Figure("memory: an owner, in matrices per owned one", per_owned(live["dmuon"], owns), 2.02),
        Figure("  reachable from its parameters and states", per_owned(reachable, owns)),
        Figure("  FSDP2 with AdamW: a rank, in matrices per one of its own", fsdp2_share(live["fsdp2"])),
        Figure("memory: all ranks, dmuon / FSDP2 with AdamW", sum(live["dmuon"]) / sum(live["fsdp2"]), 0.7),
    ]


def per_owned(held: list[float], owns: list[int]) -> float:
    return max(held / own for held, own in zip(held, owns) if own) / MATRIX


def fsdp2_share(held: list[float]) -> float:
    return max(held) / (UNITS / WORLD_SIZE) / MATRIX


def held(side: str) -> tuple[int, int, int]:
    """Reachable bytes of the matrices, live bytes of everything, owned matrices: this rank's."""
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        model, optimizer = build(side)
        for _ in range(2):
            model(torch.ones(2, SIZE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
    return reachable_bytes(model, optimizer), live_bytes(profile), owned_count(side, model)


def build(side: str):
    model, mesh = Chain(UNITS, 1, SIZE), cpu_mesh()
    if side == "dmuon":
        dmuon.dedicate_params(model, mesh, is_block_matrix)
    if side == "nobody":
        for unit in model.units:
            unit.matrices = torch.nn.ParameterList()
    shard(model, model.units, mesh)
    if side == "dmuon":
        return model, dmuon.Muon(model)
    return model, torch.optim.AdamW(model.parameters())


def live_bytes(profile) -> int:
    """The allocator's own account: a negative event is memory given back."""
    events = profile.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def owned_count(side: str, model) -> int:
    if side != "dmuon":
        return 0
    rank = torch.distributed.get_rank()
    return sum(owned.is_owner for owned in dmuon.get_owned_params(model, rank))


def reachable_bytes(model, optimizer) -> int:
    """Unique storages behind the blocks' matrices, dmuon's masters and the matrices' states."""
    matrices = list(block_matrices(model).values())
    found = [*matrices, *(optimizer.state[p] for p in matrices if p in optimizer.state)]
    if isinstance(optimizer, dmuon.Muon):
        owned = dmuon.get_owned_params(model, torch.distributed.get_rank())
        found += [matrix._owned_data for matrix in owned]
    storages = {s.data_ptr(): s.nbytes() for s in map(storage, tensors(found))}
    return sum(storages.values())


def tensors(things: Iterable) -> Iterator[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict):
            yield from tensors(thing.values())
        elif isinstance(thing, list | tuple):
            yield from tensors(thing)


def storage(tensor: Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()

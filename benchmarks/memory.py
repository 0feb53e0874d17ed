"""Bytes that a rank holds between steps.

Three equal matrices on four ranks, so that one rank owns none. Counted twice: from the storages
that can be reached from the model and the optimizer, and as what the C library's allocator has
handed out, beyond the same model without matrices. The second sees what an engine keeps out of
reach, and anything else that is not freed, so it is no sharp limit for owners.
"""

import ctypes
import gc
from collections.abc import Iterable, Iterator

import dmuon
import torch
from models import Chain, block_matrices, is_block_matrix
from support import Figure, cpu_mesh, run_ranks, shard
from torch import Tensor

WORLD_SIZE, UNITS, SIZE = 4, 3, 512
MATRIX = SIZE * SIZE * 4
SIDES = ("nobody", "fsdp2", "dmuon")


class HeapInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def measure() -> list[Figure]:
    ranks = {side: run_ranks(held, WORLD_SIZE, side) for side in SIDES}
    rest = [heap for _, heap, _ in ranks["nobody"]]
    heap = {s: [held[1] - base for held, base in zip(ranks[s], rest)] for s in ("fsdp2", "dmuon")}
    reachable = [held[0] for held in ranks["dmuon"]]
    owns = [held[2] for held in ranks["dmuon"]]
    bystander = owns.index(0)
    share = max(heap["fsdp2"]) / (UNITS / WORLD_SIZE) / MATRIX
    return [
        Figure(
            "memory: reachable where nothing is owned, in matrices",
            reachable[bystander] / MATRIX,
            0.01,
        ),
        Figure("memory: its whole heap, in matrices", heap["dmuon"][bystander] / MATRIX, 0.2),
        Figure("memory: reachable on an owner, per owned matrix", per_owned(reachable, owns), 2.01),
        Figure("  its whole heap, per owned matrix", per_owned(heap["dmuon"], owns)),
        Figure("  FSDP2 with AdamW: heap of a rank, per matrix of its own", share),
        Figure(
            "  heaps of all ranks, dmuon / FSDP2 with AdamW",
            sum(heap["dmuon"]) / sum(heap["fsdp2"]),
        ),
    ]


def per_owned(held: list[float], owns: list[int]) -> float:
    return max(held / own for held, own in zip(held, owns) if own) / MATRIX


def held(side: str) -> tuple[int, int, int]:
    """Reachable bytes of the matrices, bytes added to the heap, matrices owned: this rank's."""
    warm_up = build_and_train(side)  # what first use allocates for good is not the model's
    del warm_up
    before = heap_bytes()
    model, optimizer = build_and_train(side)
    return reachable_bytes(model, optimizer), heap_bytes() - before, owned_count(side, model)


def build_and_train(side: str):
    model, optimizer = build(side)
    for _ in range(2):
        model(torch.ones(2, SIZE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


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


def heap_bytes() -> int:
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = HeapInfo
    info = library.mallinfo2()
    return info.uordblks + info.hblkhd


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
    storages = (storage(tensor) for tensor in tensors(found))
    return sum({address(s): s.nbytes() for s in storages if address(s)}.values())


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


def address(storage: torch.UntypedStorage) -> int:
    """0 where there is no memory: what stands for another rank's state is a shape without data."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0

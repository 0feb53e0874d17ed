"""Bytes on the wire in the whole job and step for the matrices of the blocks, in units of (N-1)P.

P is the size of those matrices and N the number of ranks. Told by dmuon's report, and by the
kernel: what the TCP connections of all ranks sent, minus what they sent when nobody moves the
matrices.
"""

import os
import socket
import stat
import struct

import dmuon
import torch
import torch.distributed as dist
from models import Chain, block_matrices, is_block_matrix
from support import Figure, cpu_mesh, run_ranks, shard

WORLD_SIZES = (2, 3, 4)
UNITS, MATRICES, SIZE = 3, 4, 128
STEPS = 3
BYTES_SENT = 200  # offset of tcpi_bytes_sent in Linux's struct tcp_info, since 4.19


def measure() -> list[Figure]:
    return [figure for world_size in WORLD_SIZES for figure in measure_world(world_size)]


def measure_world(world_size: int) -> list[Figure]:
    figures = []
    for reshard, limit in ((True, 3.1), (False, 2.1)):
        sides = run_ranks(count_all, world_size, reshard)
        reported, kernel, fsdp2, calls = (sum(rank[at] for rank in sides) for at in range(4))
        unit = (world_size - 1) * UNITS * MATRICES * SIZE * SIZE * 4
        where = f"N={world_size}, reshard_after_forward={reshard}"
        figures += [
            Figure(f"wire, {where}: report", reported / unit, limit),
            Figure(f"wire, {where}: kernel", kernel / unit, limit),
            Figure("  FSDP2 with AdamW: kernel", fsdp2 / unit),
            Figure("  Newton-Schulz calls too many or too few", abs(calls - UNITS * MATRICES), 0),
        ]
    return figures


def count_all(reshard: bool) -> tuple[int, float, float, int]:
    """This rank's bytes in a step, as dmuon reports them, as the kernel saw dmuon's and FSDP2's;
    and how often this rank ran Newton-Schulz in it."""
    nobody, _ = count("nobody", reshard)
    ours, report = count("dmuon", reshard)
    fsdp2, _ = count("fsdp2", reshard)
    reported = report["sent_bytes_last_step"]
    return reported, ours - nobody, fsdp2 - nobody, report["ns_calls_last_step"]


def count(side: str, reshard: bool) -> tuple[float, dict]:
    model, optimizer = build(side, reshard)
    train(model, optimizer)
    before = kernel_sent_bytes()
    for _ in range(STEPS):
        train(model, optimizer)
    sent = (kernel_sent_bytes() - before) / STEPS
    return sent, dmuon.report(model) if side == "dmuon" else {}


def build(side: str, reshard: bool):
    torch.manual_seed(0)
    model, mesh = Chain(UNITS, MATRICES, SIZE), cpu_mesh()
    if side == "dmuon":
        dmuon.dedicate_params(model, mesh, is_block_matrix, reshard_after_forward=reshard)
    ignored = {"ignored_params": set(block_matrices(model).values())} if side == "nobody" else {}
    shard(model, model.units, mesh, reshard_after_forward=reshard, **ignored)
    if side == "dmuon":
        return model, dmuon.Muon(model)
    symmetric = [
        p for n, p in model.named_parameters() if side == "fsdp2" or not is_block_matrix(n, p)
    ]
    return model, torch.optim.AdamW(symmetric)


def train(model, optimizer) -> None:
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()


def kernel_sent_bytes() -> int:
    """What this process has sent over the TCP connections it has open, ever since they opened."""
    dist.barrier()
    return sum(sent_on(int(fd)) for fd in os.listdir("/proc/self/fd") if is_tcp(int(fd)))


def is_tcp(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as peer:
            inet = peer.family in (socket.AF_INET, socket.AF_INET6)
            return inet and peer.type == socket.SOCK_STREAM
    except OSError:  # closed since it was listed
        return False


def sent_on(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as peer:
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("<Q", info, BYTES_SENT)[0]

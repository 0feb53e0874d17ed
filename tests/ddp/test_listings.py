"""The spec's listing of DDP + TP, as written, but for "cuda", and the README's."""

import dmuon
import torch
import torch.nn.functional as F
from torch.distributed import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import INPUTS, OUTPUTS, Net
from tests.support.parity import full_weights, gathered, total
from tests.support.ranks import run_ranks


def train_two_steps(model, optimizer, seed):
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        g = torch.Generator().manual_seed(seed)
        x, y = torch.randn(32, INPUTS, generator=g), torch.randn(32, OUTPUTS, generator=g)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_the_listing_of_ddp_with_tensor_parallelism():
    run_ranks(check_ddp_tp, 4)


def check_ddp_tp(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net(dims=((16, 32), (16, 32)))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

    parallelize_module(model, mesh["tp"], plan)  # 先应用 TP
    dmuon.dedicate_params_ddp_tp(
        model, mesh["dp"], predicate=lambda n, p: "blocks" in n and p.ndim == 2
    )
    dmuon.replicate_tp(model, mesh["dp"])  # 非专属参数
    optimizer = dmuon.Muon(model, lr=0.02)

    train_two_steps(model, optimizer, seed=rank // 2)
    assert total(dmuon.report(model)["ns_calls_last_step"]) == 4
    assert (
        len({tuple(w.sum().item() for w in ws.values()) for ws in gathered(full_weights(model))})
        == 1
    )


def test_the_listings_of_ddp():
    run_ranks(check_ddp, 2)


def check_ddp(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for by_torch in (False, True):
        torch.manual_seed(0)
        model = Net()

        dmuon.dedicate_params_ddp(
            model, mesh, predicate=lambda name, p: name.startswith("blocks.") and p.ndim == 2
        )
        if by_torch:
            model = DistributedDataParallel(model)
        else:
            dmuon.replicate(model, mesh)
        optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

        train_two_steps(model, optimizer, seed=rank)
        assert total(dmuon.report(model)["ns_calls_last_step"]) == 4
        assert dmuon.get_owned_params(model, rank)

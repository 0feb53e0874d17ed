"""The listings of the documents, run as written on a "cpu" mesh.

Only what a listing leaves to the reader (`MyModel`, `dataloader`, `world_size`) is added, and
`.cuda()` is left out.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import run_ranks


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q_proj = nn.Linear(dim, dim)
        self.up_proj = nn.Linear(dim, 2 * dim)
        self.down_proj = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(self.q_proj(self.norm(x)))))


class MyModel(nn.Module):
    """Gives an object with a `loss`, as the listings' models do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(16) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=(self.head(x) - 1).square().mean())


def batches(rank, count=8):
    """The same batch again and again: its loss must fall."""
    return [torch.randn(12, 16, generator=torch.Generator().manual_seed(rank))] * count


@pytest.mark.parametrize("world_size", [2, 4])
def test_custom_training_loop(world_size):
    run_ranks(check_custom_loop, world_size)


def check_custom_loop(rank, world_size):
    dataloader = batches(rank)
    losses = []

    import dmuon
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    model = MyModel()

    dmuon.dedicate_params(model, mesh, predicate=lambda n, p: p.ndim == 2 and "proj" in n)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

    for batch in dataloader:
        optimizer.zero_grad()
        loss = model(batch).loss
        loss.backward()
        # optimizer.step() waits for the reduces, runs NS and AdamW, and publishes
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0], losses
    for dp in dmuon.get_owned_params(model, rank=dist.get_rank()):
        assert (
            f"{dp.param_name}: "
            f"local={tuple(dp._orig_size)}, "
            f"full={tuple(dp.full_shape)}, "
            f"shard_dim={dp.shard_dim}, "
            f"is_tp_owner={dp.is_tp_owner}, "
            f"tp_group_size={dp.tp_group.size() if dp.tp_group else 1}"
        ).endswith("tp_group_size=1")


@pytest.mark.parametrize("world_size", [2, 4])
def test_manual_overrides_and_accumulation(world_size):
    run_ranks(check_manual_overrides, world_size)


def check_manual_overrides(rank, world_size):
    from contextlib import nullcontext

    import dmuon

    dataloader, accum_steps, losses = batches(rank, 16), 4, []
    model, optimizer = wrapped(dmuon, world_size)

    for i, batch in enumerate(dataloader):
        ctx = dmuon.no_sync(model) if (i + 1) % accum_steps != 0 else nullcontext()
        with ctx:
            loss = model(batch).loss / accum_steps
            loss.backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    assert losses[-1] < losses[0], losses
    dmuon.wait_all_replicate_broadcasts(model)
    model_sd = dmuon.get_model_state_dict(model)
    assert set(model_sd) == (set(dict(MyModel().named_parameters())) if rank == 0 else set())


def wrapped(dmuon, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    model = MyModel()
    dmuon.dedicate_params(model, mesh, predicate=lambda n, p: p.ndim == 2 and "proj" in n)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)


@pytest.mark.parametrize("world_size", [2])
def test_torchtitan_style_named_slice(world_size):
    run_ranks(check_named_slice, world_size)


def check_named_slice(rank, world_size):
    import dmuon
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    model = MyModel()

    dmuon.dedicate_params(
        model,
        mesh["dp"],
        predicate=lambda n, p: p.ndim == 2 and "proj" in n,
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

    for batch in batches(rank):
        optimizer.zero_grad()
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
    assert all(dp._owned_data.isfinite().all() for dp in dmuon.get_owned_params(model, rank))

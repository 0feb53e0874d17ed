"""Hybrid sharding and tensor parallelism: torchrun --nproc-per-node 8 examples/quickstart/hsdp_tp.py"""

import dmuon
import torch.distributed as dist
from tiny import Tiny, batch, is_hidden_matrix, show
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
data = mesh["replicate", "shard"]
model = Tiny()

for block in model.blocks:  # first: the TP axis is found from what this makes
    parallelize_module(
        block, mesh["tp"], {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    )
dmuon.dedicate_params(
    model, mesh["shard"], predicate=is_hidden_matrix, replicate_mesh=mesh["replicate"]
)
for block in model.blocks:
    fully_shard(block, mesh=data)
fully_shard(model, mesh=data)
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=0.01)

replica, shard, _ = mesh.get_coordinate()  # the ranks of a TP group see the same rows
for step in range(20):
    optimizer.zero_grad()
    loss = model(*batch(step, 2 * replica + shard, data.size()))
    loss.backward()
    dmuon.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    show(step, loss)
dist.destroy_process_group()

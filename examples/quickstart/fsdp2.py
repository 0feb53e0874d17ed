"""FSDP2: torchrun --nproc-per-node 4 examples/quickstart/fsdp2.py"""

import dmuon
import torch
import torch.distributed as dist
from tiny import Tiny, batch, is_hidden_matrix, show
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")  # on GPUs: "nccl"
mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # on GPUs: "cuda", and the model there too
model = Tiny()

dmuon.dedicate_params(model, mesh, predicate=is_hidden_matrix)  # first
for block in model.blocks:
    fully_shard(block, mesh=mesh)  # skips the dedicated matrices
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=0.01)  # last

for step in range(20):
    optimizer.zero_grad()
    loss = model(*batch(step, mesh.get_local_rank(), mesh.size()))
    loss.backward()
    dmuon.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    show(step, loss)

weights = dmuon.get_model_state_dict(model)  # every rank calls; rank 0 gets the whole weights
if dist.get_rank() == 0:
    torch.save(weights, "weights.pt")
dist.destroy_process_group()

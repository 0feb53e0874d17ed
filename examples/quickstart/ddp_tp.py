"""DDP with tensor parallelism: torchrun --nproc-per-node 4 examples/quickstart/ddp_tp.py"""

import dmuon
import torch.distributed as dist
from tiny import Tiny, batch, is_hidden_matrix, show
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = Tiny()

for block in model.blocks:
    parallelize_module(
        block, mesh["tp"], {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    )
dmuon.dedicate_params_ddp_tp(model, mesh["dp"], predicate=is_hidden_matrix)
dmuon.replicate_tp(model, mesh["dp"])
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=0.01)

for step in range(20):
    optimizer.zero_grad()
    loss = model(*batch(step, mesh["dp"].get_local_rank(), mesh["dp"].size()))
    loss.backward()
    dmuon.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    show(step, loss)
dist.destroy_process_group()

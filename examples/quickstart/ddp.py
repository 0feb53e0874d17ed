"""DDP: torchrun --nproc-per-node 4 examples/quickstart/ddp.py"""

import dmuon
import torch.distributed as dist
from tiny import Tiny, batch, is_hidden_matrix, show
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Tiny()

dmuon.dedicate_params_ddp(model, mesh, predicate=is_hidden_matrix)
dmuon.replicate(model, mesh)  # or: model = DistributedDataParallel(model)
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=0.01)

for step in range(20):
    optimizer.zero_grad()
    loss = model(*batch(step, mesh.get_local_rank(), mesh.size()))
    loss.backward()
    dmuon.clip_grad_norm_(optimizer, 1.0)
    optimizer.step()
    show(step, loss)
dist.destroy_process_group()

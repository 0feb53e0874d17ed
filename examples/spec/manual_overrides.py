"""A checkpoint amid asynchronous updates, then gradient accumulation.

    torchrun --nproc-per-node 4 examples/spec/manual_overrides.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
"""

import setting
import torch.distributed as dist
from setting import Watched, batches, share_of
from torch.distributed.device_mesh import init_device_mesh

sizes = (2, setting.ranks_over(2))
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
model, optimizer = setting.hsdp(mesh)
losses = setting.train(model, optimizer, batches(*share_of(mesh), range(2)))
optimizer.zero_grad()

accum_steps = 4
micro_batches = batches(*share_of(mesh), range(2, 4), accum_steps)
dataloader = Watched(micro_batches, lambda: loss * accum_steps)

# fmt: off
import dmuon
from contextlib import nullcontext

# Before a checkpoint in HSDP's asynchronous mode: end pending broadcasts
dmuon.wait_all_replicate_broadcasts(model)
model_sd = dmuon.get_model_state_dict(model)

# Gradient accumulation
for i, batch in enumerate(dataloader):
    ctx = dmuon.no_sync(model) if (i + 1) % accum_steps != 0 else nullcontext()
    with ctx:
        loss = model(batch).loss / accum_steps
        loss.backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
# fmt: on

weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

"""A training loop of one's own.

    torchrun --nproc-per-node 4 examples/spec/custom_loop.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
"""

import os

import torch.distributed as dist
from setting import MyModel, Watched, batches

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dataloader = Watched(batches(rank, world_size, range(4)), lambda: loss)

# fmt: off
import dmuon
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (world_size,))
model = MyModel()

dmuon.dedicate_params(
    model, mesh, predicate=lambda n, p: p.ndim == 2 and "proj" in n
)
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

for batch in dataloader:
    optimizer.zero_grad()
    loss = model(batch).loss
    loss.backward()
    # optimizer.step() does wait_all_reduces + NS + AdamW +
    # broadcast_all_updates: nothing to call by hand
    optimizer.step()
# fmt: on

weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

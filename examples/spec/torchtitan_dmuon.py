# ruff: noqa: B007 (the listing as written)
"""torchtitan's parallelize function, by hand.

    torchrun --nproc-per-node 2 examples/spec/torchtitan_dmuon.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader. In
torchtitan's own Trainer: examples/torchtitan/train.py.
"""

import torch.distributed as dist
from torchtitan_setting import Watched, batches, build_model, llama3, parallelize_model

dist.init_process_group("gloo")
config = llama3()
dataloader = Watched(batches(dist.get_rank(), dist.get_world_size()), lambda: loss)

# fmt: off
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import dmuon

mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
model = build_model(config)

# before torchtitan wraps the model
dmuon.dedicate_params(
    model, mesh["dp"],
    predicate=lambda n, p: p.ndim == 2 and "proj" in n,
)
parallelize_model(model, mesh, config)   # torchtitan calls fully_shard and TP here

optimizer = dmuon.Muon(model, lr=config.lr, adamw_lr=config.adamw_lr)

for step, batch in enumerate(dataloader):
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step()
# fmt: on

weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

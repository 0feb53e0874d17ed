"""Three axes: replicas of sharded, tensor-parallel models.

    torchrun --nproc-per-node 8 examples/spec/hsdp_tensor_parallel.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
"""

import dmuon
import setting
import torch.distributed as dist
from setting import MyModel, batches, predicate, share_of, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

R, T = 2, 2
G = setting.ranks_over(R * T)
model, plan = MyModel(), setting.plan()

# fmt: off
mesh3d = init_device_mesh(
    "cpu", (R, G, T),
    mesh_dim_names=("replicate", "shard", "tp"),
)

# Step 1: TP
parallelize_module(model, mesh3d["tp"], plan)

# Step 2: DMuon (DP = replicate x shard)
dmuon.dedicate_params(
    model,
    mesh=mesh3d["shard"],
    replicate_mesh=mesh3d["replicate"],
    predicate=predicate,
)

# Step 3: FSDP2 (the same 2-D slice of DP)
fully_shard(model, mesh=mesh3d["replicate", "shard"])

optimizer = dmuon.Muon(model, lr=0.02)
# fmt: on

losses = train(model, optimizer, batches(*share_of(mesh3d["replicate", "shard"]), range(4)))
weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

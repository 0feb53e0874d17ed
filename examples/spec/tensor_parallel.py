"""Tensor parallelism beside FSDP2.

    torchrun --nproc-per-node 4 examples/spec/tensor_parallel.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
"""

import torch.distributed as dist
from setting import MyModel, batches, ranks_over, share_of, train

tp_size = 2
dp_size = ranks_over(tp_size)

# fmt: off
import dmuon
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)

# 2-D mesh (dp x tp), the usual layout
mesh = init_device_mesh(
    "cpu", (dp_size, tp_size),
    mesh_dim_names=("dp", "tp"),        # names of the dims are a must
)

model = MyModel()

# Step 1: TP
for layer in model.layers:
    parallelize_module(
        layer.self_attn, mesh["tp"],
        {
            "q_proj": ColwiseParallel(),
            "k_proj": ColwiseParallel(),
            "v_proj": ColwiseParallel(),
            "o_proj": RowwiseParallel(),
        },
    )
    parallelize_module(
        layer.mlp, mesh["tp"],
        {
            "gate_proj": ColwiseParallel(),
            "up_proj":   ColwiseParallel(),
            "down_proj": RowwiseParallel(),
        },
    )

# Step 2: DMuon (gets the DP slice, not the TP one)
dmuon.dedicate_params(
    model, mesh["dp"],
    predicate=lambda n, p: "proj" in n and p.ndim == 2,
)

# Step 3: FSDP2 (the DP slice too)
for layer in model.layers:
    fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])

# Optimizer: TP needs no settings
optimizer = dmuon.Muon(model, lr=0.02, momentum=0.95, adamw_lr=1e-3)
# fmt: on

losses = train(model, optimizer, batches(*share_of(mesh["dp"]), range(4)))
weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

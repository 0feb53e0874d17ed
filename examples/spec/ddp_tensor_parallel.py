"""Tensor parallelism inside each replica of DDP.

    torchrun --nproc-per-node 4 examples/spec/ddp_tensor_parallel.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
"""

import dmuon
import setting
import torch.distributed as dist
from setting import MyModel, batches, predicate, share_of, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

tp_size = 2
sizes = (setting.ranks_over(tp_size), tp_size)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
model, plan = MyModel(), setting.plan()

# fmt: off
parallelize_module(model, mesh["tp"], plan)                 # TP first
dmuon.dedicate_params_ddp_tp(model, mesh["dp"], predicate=predicate)
dmuon.replicate_tp(model, mesh["dp"])                       # what is not dedicated
optimizer = dmuon.Muon(model, lr=0.02)
# fmt: on

losses = train(model, optimizer, batches(*share_of(mesh["dp"]), range(4)))
weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

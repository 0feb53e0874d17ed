"""When updates reach the other replicas: before ``step`` returns, or beside the next forward. The bits are the same.

    torchrun --nproc-per-node 4 examples/spec/sync_async.py      # 2 tensor-parallel ranks
    torchrun --nproc-per-node 4 examples/spec/sync_async.py 1    # none

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
Without tensor parallelism the default is asynchronous.
"""

import sys

import dmuon
import setting
import torch
import torch.distributed as dist
from setting import batches, share_of, show, train
from torch.distributed.device_mesh import init_device_mesh

tp_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
sizes = (setting.ranks_over(tp_size), tp_size)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


model = setting.ddp_tensor_parallel(mesh)
# fmt: off
# The default, safe with TP: scatter + broadcast end before step() returns
optimizer = dmuon.Muon(model, lr=0.02)
# fmt: on
losses = train(model, optimizer, batches(*share_of(mesh["dp"]), range(4)))
weights = dmuon.get_model_state_dict(model)  # whole, on the first rank

model = setting.ddp_tensor_parallel(mesh)
# fmt: off
# Synchronous: scatter + broadcast end before step() returns
optimizer = dmuon.Muon(model, lr=0.02, replicate_async=False)
# fmt: on
losses_again = train(model, optimizer, batches(*share_of(mesh["dp"]), range(4)))
weights_again = dmuon.get_model_state_dict(model)

same = all(torch.equal(weights[name], weights_again[name]) for name in weights)
show(f"the same weights, bit for bit: {same}")
dist.destroy_process_group()

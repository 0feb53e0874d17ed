"""What a rank owns under tensor parallelism.

    torchrun --nproc-per-node 4 examples/spec/inspection.py      # 2 tensor-parallel ranks
    torchrun --nproc-per-node 4 examples/spec/inspection.py 1    # none

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
"""

import sys

import setting
from torch.distributed.device_mesh import init_device_mesh

tp_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
sizes = (setting.ranks_over(tp_size), tp_size)
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
model = setting.tensor_parallel(mesh)

# fmt: off
import dmuon
import torch.distributed as dist

for dp in dmuon.get_owned_params(model, rank=dist.get_rank()):
    print(
        f"{dp.param_name}: "
        f"local={tuple(dp._orig_size)}, "
        f"full={tuple(dp.full_shape)}, "
        f"shard_dim={dp.shard_dim}, "
        f"is_tp_owner={dp.is_tp_owner}, "
        f"tp_group_size={dp.tp_group.size() if dp.tp_group else 1}"
    )
# fmt: on

dist.destroy_process_group()

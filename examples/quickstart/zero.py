"""DeepSpeed ZeRO: torchrun --nproc-per-node 2 examples/quickstart/zero.py"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # on GPUs leave out these two
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import deepspeed
import deepspeed.ops
import dmuon  # noqa: F401 (from here on deepspeed.initialize knows "DMuon")
import torch.distributed as dist
from tiny import ROWS, Tiny, batch, show

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on GPUs leave out: it compiles C++
deepspeed.init_distributed()

config = {
    "train_batch_size": ROWS,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": int(sys.argv[1]) if sys.argv[1:] else 3},
    "optimizer": {"type": "DMuon", "params": {"lr": 0.02, "adamw_lr": 0.01}},
    "dmuon": {"include": ["*_proj"]},
}
engine, *_ = deepspeed.initialize(model=Tiny(), config=config)

for step in range(20):
    loss = engine(*batch(step, dist.get_rank(), dist.get_world_size()))
    engine.backward(loss)
    engine.step()
    show(step, loss)
engine.destroy()
dist.destroy_process_group()

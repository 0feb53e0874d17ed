"""DeepSpeed ZeRO: its JSON alone decides that dmuon trains the model.

torchrun --nproc-per-node 2 examples/spec/deepspeed_dmuon.py
torchrun --nproc-per-node 2 examples/spec/deepspeed_dmuon.py my_config.json
"""

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # these three are for machines without a GPU
os.environ["TORCHDYNAMO_DISABLE"] = "1"
import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

import deepspeed
import dmuon
import torch.distributed as dist
from setting import MyModel, Watched, batches

config = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("ds_config.json"))
deepspeed.init_distributed("gloo")
dataloader = Watched(batches(dist.get_rank(), dist.get_world_size(), range(4)), lambda: loss)

engine, optimizer, _, scheduler = deepspeed.initialize(model=MyModel(), config=config)

for batch in dataloader:
    loss = engine(batch).loss
    engine.backward(loss)
    engine.step()

weights = dmuon.get_model_state_dict(engine)  # whole, on the first rank
dist.destroy_process_group()

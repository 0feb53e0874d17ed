"""A Hugging Face model, in bfloat16.

    torchrun --nproc-per-node 2 examples/spec/hf_dmuon.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader. A tiny random Llama stands for the one to download.
"""

import os

from setting import Watched, batches, tiny_llama

TINY_LLAMA = tiny_llama()
tokens = batches(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), range(4))
dataloader = Watched(({"input_ids": x, "labels": x} for x in tokens), lambda: outputs.loss)

# fmt: off
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
import dmuon

dist.init_process_group(backend="gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

model = AutoModelForCausalLM.from_pretrained(
    TINY_LLAMA, torch_dtype=torch.bfloat16,
)

# Step 1: dedicate parameters, before fully_shard
dmuon.dedicate_params(
    model, mesh,
    predicate=lambda n, p: p.ndim == 2 and any(
        k in n for k in ("q_proj", "k_proj", "v_proj", "o_proj",
                         "gate_proj", "up_proj", "down_proj")
    ),
)
# Step 2: FSDP2 as ever; it skips dedicated parameters
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

# Step 3: dmuon.Muon is the optimizer
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

for batch in dataloader:
    optimizer.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
# fmt: on

weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

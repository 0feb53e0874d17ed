"""Save, train on, load, and train the same steps again.

    torchrun --nproc-per-node 4 examples/spec/checkpoint_save.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader.
It writes ``out/spec/checkpoint.pt``.
"""

import os
from pathlib import Path

import setting
from setting import batches, share_of, show
from torch.distributed.device_mesh import init_device_mesh

Path("out/spec").mkdir(parents=True, exist_ok=True)
os.chdir("out/spec")
sizes = (2, setting.ranks_over(2))
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
model, optimizer = setting.hsdp(mesh)
setting.train(model, optimizer, batches(*share_of(mesh), range(2)))

# fmt: off
import torch
import torch.distributed as dist
import dmuon

model_sd = dmuon.get_model_state_dict(model)      # pending broadcasts end first
optim_sd = dmuon.get_optimizer_state_dict(model, optimizer)
if dist.get_rank() == 0:
    torch.save({"model": model_sd, "optim": optim_sd}, "checkpoint.pt")
dist.barrier()
# fmt: on

show("as if nothing had been saved:")
losses = setting.train(model, optimizer, batches(*share_of(mesh), range(2, 4)))
weights = dmuon.get_model_state_dict(model)  # whole, on the first rank

# fmt: off
ckpt = torch.load("checkpoint.pt", map_location="cpu")
dmuon.set_model_state_dict(model, ckpt["model"])
dmuon.set_optimizer_state_dict(model, optimizer, ckpt["optim"])
# fmt: on

show("again, from the checkpoint:")
losses_again = setting.train(model, optimizer, batches(*share_of(mesh), range(2, 4)))
weights_again = dmuon.get_model_state_dict(model)
show(f"the same losses: {losses == losses_again}")
dist.destroy_process_group()

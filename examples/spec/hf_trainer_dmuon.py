"""Hugging Face Trainer.

    torchrun --nproc-per-node 2 examples/spec/hf_trainer_dmuon.py

The listing stands between the comments that keep the formatter from it; around it is what it leaves to the reader. A
tiny random Llama stands for the one to download. Checkpoints go to ./output, as Trainer writes them by default.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

# fmt: off
from transformers import Trainer, TrainingArguments
import dmuon
# fmt: on

dist.init_process_group(backend="gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
dmuon.dedicate_params(model, mesh, predicate=lambda n, p: p.ndim == 2 and "_proj" in n)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
train_dataset = []
for first in torch.randint(48, (64, 1)):  # each token says which one is next
    tokens = torch.stack([(first[0] * 5**i + 7 * (5**i - 1) // 4) % 48 for i in range(8)])
    train_dataset.append({"input_ids": tokens, "labels": tokens})

# fmt: off
training_args = TrainingArguments(
    output_dir="./output",
    per_device_train_batch_size=2,
    num_train_epochs=3,
    fsdp="",           # Trainer wraps nothing itself
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=train_dataset,
    optimizers=(optimizer, None),   # (optimizer, lr_scheduler)
)
trainer.train()
# fmt: on

weights = dmuon.get_model_state_dict(model)  # whole, on the first rank
dist.destroy_process_group()

"""torchtitan, also where there is no GPU: it knows no CPU, and its package brings neither data nor tokenizer."""

from dataclasses import dataclass

import on_cpu  # first
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import debug
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    decode = get_vocab_size = encode


class Sequences(BaseDataLoader):
    """Sequences in which each token follows from the one before, except for one in four."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 2048
        unlabelled: int = (
            0  # of the first tokens; so many more on each rank, that means over ranks differ
        )

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_):
        self.config, self.rank, self.ranks = config, dp_rank, dp_world_size
        self.shape, self.taken = (local_batch_size, seq_len), 0

    def __iter__(self):
        while True:
            self.taken += 1
            yield self.batch((self.taken - 1) * self.ranks + self.rank)

    def batch(self, index):
        """The batch of that number in the whole job."""
        rows, length = self.shape
        g = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.config.vocabulary, (rows, length + 1), generator=g)
        follows = torch.rand(rows, length, generator=g) < 0.75
        for i in range(length):
            following = (7 * tokens[:, i] + 3) % self.config.vocabulary
            tokens[:, i + 1] = torch.where(follows[:, i], following, tokens[:, i + 1])
        labels = tokens[:, 1:].clone()
        labels[:, : self.config.unlabelled * (1 + index % self.ranks)] = -100
        return {"input": tokens[:, :-1].contiguous()}, labels

    def state_dict(self):
        """In batches of the whole job, so that another number of ranks goes on there."""
        return {"taken": self.taken * self.ranks}

    def load_state_dict(self, state_dict):
        self.taken = state_dict.get("taken", 0) // self.ranks


def llama3(*, layers=6, **config) -> Trainer.Config:
    """torchtitan's llama3 ``debugmodel``, as its own config of that name, but for what the CPU lacks.

    Args:
        layers: the first of its six.
        config: fields of ``Trainer.Config``; those of ``training`` and ``parallelism`` as dictionaries.
    """
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:layers]
    if on_cpu.ON_CPU:
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    training = {"local_batch_size": 4, "seq_len": 64, "steps": 20, "disable_cuda_graphs": True}
    if on_cpu.ON_CPU:
        training |= {"mixed_precision_param": "float32"}
    training |= config.pop("training", {})
    return Trainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=config.pop("dataloader", None) or Sequences.Config(),
        training=TrainingConfig(**training),
        parallelism=ParallelismConfig(**config.pop("parallelism", {})),
        lr_scheduler=config.pop("lr_scheduler", None)
        or LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8),
        loss=config.pop("loss", None)
        or ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=2048)),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(enable=False),
        **config,
    )


def build(config: Trainer.Config) -> Trainer:
    """Its Trainer. gloo sums, and knows no factor, which torchtitan asks for (of 1).

    A process may build several, one after the other: DTensor would go on with the meshes of the first.
    """
    debug._clear_sharding_prop_cache()
    trainer = config.build()
    if on_cpu.ON_CPU:
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
    return trainer

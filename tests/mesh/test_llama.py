"""A real architecture, with the calls of the tensor-parallel listing."""

import pytest
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.hf import llama_config
from tests.support.meshes import dp_tp, run_on
from tests.support.parity import BATCH, check_parity
from tests.support.tp_models import VOCABULARY

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("layout", [dp_tp(2, 2)], ids=str)
def test_a_tiny_llama(layout):
    run_on(layout, check_llama)


def check_llama(rank, layout):
    check_parity(
        rank,
        layout,
        make_model=tiny_llama,
        parallelize=parallelize,
        wrap=shard_layers,
        predicate=lambda n, p: "proj" in n and p.ndim == 2,
        sample=tokens,
        criterion=lambda model, x, y: model(input_ids=x, labels=y).loss,
    )


def tiny_llama():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(VOCABULARY))


def parallelize(model, tp):
    for layer in model.model.layers:
        parallelize_module(
            layer.self_attn,
            tp,
            {
                "q_proj": ColwiseParallel(),
                "k_proj": ColwiseParallel(),
                "v_proj": ColwiseParallel(),
                "o_proj": RowwiseParallel(),
            },
        )
        parallelize_module(
            layer.mlp,
            tp,
            {
                "gate_proj": ColwiseParallel(),
                "up_proj": ColwiseParallel(),
                "down_proj": RowwiseParallel(),
            },
        )


def shard_layers(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tokens(g):
    import torch

    x = torch.randint(VOCABULARY, (BATCH, 6), generator=g)
    return x, x

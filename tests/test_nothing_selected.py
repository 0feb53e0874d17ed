"""A predicate written for another model: the error says what this one has, under every runtime."""

import dmuon
import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks

LAYERS = 24
KINDS = ("'layers.*.wq.weight' (24)", "'layers.*.w1.weight' (24)", "'head.weight'")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wq, self.w1 = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 16)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(8, 4)


def proj(name, parameter):
    return "proj" in name


def test_the_matrices_of_the_model_are_listed_by_kind():
    run_ranks(check_listed, 2)


def check_listed(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))["dp"]
    for dedicate in (
        dmuon.dedicate_params,
        dmuon.dedicate_params_ddp,
        dmuon.dedicate_params_ddp_tp,
    ):
        assert_all_raise(
            lambda dedicate=dedicate: dedicate(Model(), mesh, proj), "ValueError", *KINDS
        )
    assert_all_raise(
        lambda: dmuon.dedicate_params(nn.RMSNorm(4), mesh, proj),
        "ValueError",
        "none of this model's has two dims or more",
    )


def test_under_deepspeed_too():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    run_ranks(check_deepspeed, 2)


def check_deepspeed(rank, world_size):
    from tests.support.zero import deepspeed_ready, ds_config

    deepspeed = deepspeed_ready()
    assert_all_raise(
        lambda: dmuon.dedicate_params_zero(Model(), ds_config(2), proj), "ValueError", *KINDS
    )
    config = ds_config(2, dmuon={"include": ["*_proj"]})
    assert_all_raise(
        lambda: deepspeed.initialize(model=Model(), config=config),
        "ValueError",
        "'*_proj'",
        *KINDS,
        '"include": [',
    )

"""Accelerate's own DistributedDataParallel over dmuon's matrices."""

import dmuon
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.support.hf import trainer_ready
from tests.support.models import INPUTS, Net, in_blocks
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks


def test_prepare_wraps_a_model_that_was_dedicated_for_it():
    run_ranks(check_prepare, 2)


def check_prepare(rank, world_size):
    trainer_ready()
    from accelerate import Accelerator

    model = Net()
    dmuon.dedicate_params_ddp(model, init_device_mesh("cpu", (world_size,)), in_blocks)
    wrapped = Accelerator(cpu=True).prepare(model)
    optimizer = dmuon.Muon(wrapped)
    before = dmuon.get_model_state_dict(wrapped, rank0_only=False)
    wrapped(torch.randn(4, INPUTS)).sum().backward()
    optimizer.step()
    after = dmuon.get_model_state_dict(wrapped, rank0_only=False)
    assert all(not torch.equal(after[name], value) for name, value in before.items())


def test_a_list_of_parameters_is_no_model():
    run_ranks(check_list, 2)


def check_list(rank, world_size):
    parameters = list(Net().parameters())
    call = lambda: dmuon.Muon(parameters)  # noqa: E731
    assert_all_raise(call, "ValueError", "a list was given", "lambda: dmuon.Muon")

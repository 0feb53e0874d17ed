"""Replicated data parallelism as users write it, for the harness of `parity.py`."""

import itertools
from functools import partial

import dmuon
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.support.parity import check_parity, gathered, setup
from tests.support.weights import local


def put_under_ddp(model, layout, predicate, wrap, parallelize=None, dedicate=None):
    """The calls of every script, in their order; returns what runs the forward."""
    mesh = layout.mesh()
    data = mesh["dp"] if layout.tp_name else mesh
    if parallelize is None:
        dmuon.dedicate_params_ddp(model, data, predicate=predicate, **(dedicate or {}))
    else:
        parallelize(model, mesh[layout.tp_name])
        dmuon.dedicate_params_ddp_tp(model, data, predicate=predicate, **(dedicate or {}))
    return wrap(model, data)


def replicated(model, mesh: DeviceMesh, **options):
    """By dmuon: `replicate`, or `replicate_tp` beside tensor parallelism."""
    call = dmuon.replicate_tp if any(map(is_dtensor, model.parameters())) else dmuon.replicate
    return call(model, mesh, **options)


def is_dtensor(parameter):
    return isinstance(parameter, torch.distributed.tensor.DTensor)


def wrapped(model, mesh: DeviceMesh, **options):
    """By torch."""
    return DistributedDataParallel(model, process_group=mesh.get_group(), **options)


BOTH = {"replicate": replicated, "DistributedDataParallel": wrapped}


def by_both():
    """A test of each of them."""
    return pytest.mark.parametrize("by", list(BOTH))


FOR_UNUSED = BOTH | {"DistributedDataParallel": partial(wrapped, find_unused_parameters=True)}


def check_ddp(rank, layout, *script, wrap=replicated, **options):
    """`check_parity`, and that every rank ends with the whole weights, bit for bit the same."""
    options = {"put": put_under_ddp, "transient": False} | options
    run = check_parity(rank, layout, *script, wrap=wrap, **options)
    assert_replicas_equal(run)
    return run


setup_ddp = partial(setup, put=put_under_ddp, wrap=replicated)


def assert_replicas_equal(run):
    """Whole weights and buffers, on every rank; of a tensor-parallel one the shard."""
    dmuon.wait_all_replicate_broadcasts(run.model)
    tensors = itertools.chain(run.model.named_parameters(), run.model.named_buffers())
    mine = {name: local(t.detach()).clone() for name, t in tensors}
    everyone = gathered((run.ranks, mine))
    ranks_per_replica = len(everyone) // run.world_size
    for at, (ranks, theirs) in enumerate(everyone):
        _, first = everyone[at % ranks_per_replica]
        for name, value in theirs.items():
            assert torch.equal(value, first[name]), f"{name} of data ranks {ranks} differs"

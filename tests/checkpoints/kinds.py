"""The runtimes and meshes that checkpoints go between, and what is compared."""

import dmuon
import torch

from tests.support.ddp import setup_ddp
from tests.support.meshes import SQUARE, flat, hsdp
from tests.support.parity import setup
from tests.support.tp_models import mixed, subject, tokens
from tests.support.weights import assert_same

# name -> (how it is set up, layout)
KINDS = {
    "alone": (setup, flat(1)),
    "fsdp2": (setup, flat(2)),
    "fsdp4": (setup, flat(4)),
    "hsdp": (setup, hsdp(2, 2)),
    "tp": (setup, SQUARE),
    "ddp": (setup_ddp, flat(2)),
    "ddp_tp": (setup_ddp, SQUARE),
}
MIXED = {"make_model": mixed, "sample": tokens}  # the model of the tensor-parallel ones, without


def layout_of(kind):
    return KINDS[kind][1]


def start(kind, model=None, **options):
    """A run whose weights and momenta are those of its first step. `model`: options that choose one."""
    make, layout = KINDS[kind]
    return make(layout, **(subject(layout) if model is None else model), **options)


def train(run, first, last):
    for step in range(first, last):
        run.train(step)


def whole(run):
    """All that training goes on from, by name, on every rank."""
    state = dmuon.get_optimizer_state_dict(run.model, run.optimizer, rank0_only=False)["state"]
    weights = dmuon.get_model_state_dict(run.model, rank0_only=False)
    return weights | {f"{n}: {k}": v for n, entry in state.items() for k, v in entry.items()}


def assert_close(got, want, tolerance):
    """Of summing in another order."""
    assert got.keys() == want.keys(), set(got) ^ set(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=name)


__all__ = ["KINDS", "MIXED", "assert_close", "assert_same", "layout_of", "start", "train", "whole"]

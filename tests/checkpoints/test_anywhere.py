"""Whatever is saved on one runtime, mesh and number of ranks loads on every other one.

Every kind of run trains three steps and saves in every way; then every kind loads what every kind has saved:
its weights and states, whole, are the same bits, and it trains on as the one that saved does.
"""

import dmuon
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.checkpoints.kinds import MIXED, assert_close, assert_same, layout_of, start, train, whole
from tests.support.meshes import run_on

KINDS = {
    "net": ("alone", "fsdp2", "hsdp", "ddp"),
    "mixed": ("fsdp2", "tp", "ddp_tp"),
}
SAVED, CONTINUED = 3, 5
# Another topology adds up in another order; measured 2e-6 after two steps, of numbers up to 3.
TOLERANCE = 2e-5


def begin(kind, model):
    return start(kind, None if layout_of(kind).tp_name or model == "net" else MIXED)


# Ways ------------------------------------------------------------------------------------------


def save_whole(run, path):
    model = dmuon.get_model_state_dict(run.model)
    optimizer = dmuon.get_optimizer_state_dict(run.model, run.optimizer)
    if dist.get_rank() == 0:
        torch.save([model, optimizer], path)


def load_whole(run, path):
    """A file that the first rank alone reads."""
    first = dist.get_rank() == 0
    model, optimizer = torch.load(path, weights_only=True) if first else ({}, {})
    dmuon.set_model_state_dict(run.model, model)
    dmuon.set_optimizer_state_dict(run.model, run.optimizer, optimizer)


def save_dcp(run, path):
    dcp.save({"app": dmuon.state_dict(run.model, run.optimizer)}, checkpoint_id=path)


def load_dcp(run, path):
    dcp.load({"app": dmuon.state_dict(run.model, run.optimizer)}, checkpoint_id=path)


def save_flat(run, path):
    dcp.save(dict(dmuon.state_dict(run.model, run.optimizer)), checkpoint_id=path)


def load_flat(run, path):
    state = dmuon.state_dict(run.model, run.optimizer)
    values = dict(state)
    dcp.load(values, checkpoint_id=path)
    state.load_state_dict(values)


def save_async(run, path):
    """Goes on training at once: what is saved is of the call."""
    state = {"app": dmuon.state_dict(run.model, run.optimizer)}
    return dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group())


def save_both(run, path):
    dcp.save(both(run), checkpoint_id=path)


def load_both(run, path):
    train(run, 20, 21)  # its first step is what makes the state of the other parameters
    state = both(run)
    dcp.load(state, checkpoint_id=path)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optim"])


def both(run):
    return {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}


def save_checkpoint(run, path):
    dmuon.save_checkpoint(path, SAVED, run.model, run.optimizer)


def load_checkpoint(run, path):
    assert dmuon.load_checkpoint(path, run.model, run.optimizer).step == SAVED


WAYS = {
    "whole": (save_whole, load_whole),
    "dcp": (save_dcp, load_dcp),
    "flat": (save_flat, load_flat),
    "async": (save_async, load_dcp),
    "both": (save_both, load_both),
    "checkpoint": (save_checkpoint, load_checkpoint),
}


def ways(model):
    """torch cannot save the DTensor of a weight that is cut into stripes; dmuon.state_dict can."""
    return {way: calls for way, calls in WAYS.items() if (way, model) != ("both", "mixed")}


# Everywhere ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", KINDS)
def test_every_kind_of_run_loads_what_every_kind_has_saved(model, tmp_path):
    for kind in KINDS[model]:
        run_on(layout_of(kind), check_save, kind, model, str(tmp_path))
    for kind in KINDS[model]:
        run_on(layout_of(kind), check_load, kind, model, str(tmp_path), limit_s=120.0)


def check_save(rank, layout, kind, model, root):
    """All ways in one moment: while the last step's publish is in flight, and async_save while training goes
    on."""
    run = begin(kind, model)
    train(run, 0, SAVED)
    pending = [save(run, f"{root}/{kind}.{way}") for way, (save, _) in ways(model).items()]
    state = whole(run)
    train(run, SAVED, CONTINUED)
    for future in filter(None, pending):
        future.result()
    after = whole(run)
    if rank == 0:
        torch.save([state, after], f"{root}/{kind}.expected")


def check_load(rank, layout, kind, model, root):
    run = begin(kind, model)
    train(run, 10, 12)  # other weights and states, the publish of which is in flight
    for source in KINDS[model]:
        saved, continued = torch.load(f"{root}/{source}.expected", weights_only=True)
        for way, (_, load) in ways(model).items():
            load(run, f"{root}/{source}.{way}")
            got = whole(run)
            assert got.keys() == saved.keys(), (source, way)
            different = [name for name in saved if not torch.equal(got[name], saved[name])]
            assert not different, (source, way, different)
            train(run, SAVED, CONTINUED)
            if source == kind:
                assert_same(whole(run), continued)
            else:
                assert_close(whole(run), continued, TOLERANCE)

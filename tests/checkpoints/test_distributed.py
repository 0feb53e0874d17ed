"""torch.distributed.checkpoint of dmuon.state_dict: who writes what, when, and for whom it is readable."""

from collections import Counter
from pathlib import Path

import dmuon
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.checkpoints.kinds import KINDS, assert_same, layout_of, start, train, whole
from tests.support.meshes import run_on
from tests.support.models import Net
from tests.support.parity import gathered
from tests.support.ranks import run_ranks

EVEN = {"make_model": lambda: Net(dims=((64, 128),) * 8)}


# Who writes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fsdp4", "hsdp", "ddp"])
def test_ranks_write_alike_much_of_one_set_of_keys(kind, tmp_path):
    run_on(layout_of(kind), check_shares, kind, str(tmp_path))


def check_shares(rank, layout, kind, root):
    """And the job writes everything once: no more than one process would."""
    run = start(kind, EVEN)
    train(run, 0, 1)
    state = dmuon.state_dict(run.model, run.optimizer)
    keys = (*state["model"], *state["optim"]["state"])
    assert set(gathered(keys)) == {keys}
    dcp.save({"app": state}, checkpoint_id=f"{root}/dcp")
    dmuon.save_checkpoint(f"{root}/safe", 1, run.model, run.optimizer)
    whole_bytes = sum(v.numel() * v.element_size() for v in whole(run).values())
    safe = Path(root, "safe", "step_0000000001").glob("*.data")
    for sizes, slack in (
        (tensor_bytes(f"{root}/dcp"), 1.0),
        ([path.stat().st_size for path in safe], 1.02),
    ):
        mean = sum(sizes) / layout.ranks
        assert len(sizes) == layout.ranks and max(sizes) <= 1.15 * mean, sizes
        assert whole_bytes <= sum(sizes) <= slack * whole_bytes


def tensor_bytes(folder):
    """Of each file that dcp wrote. The files themselves have a kilobyte more per tensor."""
    metadata, sizes = dcp.FileSystemReader(folder).read_metadata(), Counter()
    for index, info in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        if isinstance(tensor, TensorStorageMetadata):
            chunk = next(c for c in tensor.chunks if c.offsets == index.offset)
            sizes[info.relative_path] += chunk.sizes.numel() * tensor.properties.dtype.itemsize
    return list(sizes.values())


def test_saving_and_loading_gathers_nothing(tmp_path):
    run_ranks(check_no_gathering, 2, str(tmp_path))


def check_no_gathering(rank, world_size, root):
    """The tensors are the training's own memory, and only owners have any."""
    run = start("fsdp2")
    train(run, 0, 1)
    state = dmuon.state_dict(run.model, run.optimizer)
    for p in dmuon.get_dedicated_params(run.model):
        weight = state["model"][p.fqn]
        momentum = state["optim"]["state"][p.fqn]["momentum_buffer"]
        if p.is_owner:
            assert weight.data_ptr() == p._owned_data.data_ptr()
            memory = run.optimizer.state[run.model.get_parameter(p.fqn)]["momentum_buffer"]
            assert momentum.data_ptr() == memory.data_ptr()
        for value in () if p.is_owner else (weight, momentum):
            assert tuple(value.shape) == tuple(p.full_shape)
            with pytest.raises(RuntimeError, match=f"rank {p.owner_rank} alone"):
                value.sum()


# When ------------------------------------------------------------------------------------------


def test_two_saves_in_flight_are_each_of_their_own_step(tmp_path):
    run_ranks(check_in_flight, 2, str(tmp_path))


def check_in_flight(rank, world_size, root):
    """Training goes on beside them, and every step starts a publish."""
    run, pending = start("fsdp2"), []
    for step in range(4):
        run.train(step)
        state = {"app": dmuon.state_dict(run.model, run.optimizer)}
        options = {"checkpoint_id": f"{root}/{step}", "process_group": dist.new_group()}
        pending.append(dcp.async_save(state, **options))
    wanted = [whole(r) for r in again()]
    for future in pending:
        future.result()
    for step in range(4):
        dcp.load(
            {"app": dmuon.state_dict(run.model, run.optimizer)}, checkpoint_id=f"{root}/{step}"
        )
        assert_same(whole(run), wanted[step])


def again():
    run = start("fsdp2")
    for step in range(4):
        run.train(step)
        yield run


# For whom --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("alone", "fsdp4")])
def test_one_process_reads_it_with_torch_load(kind, tmp_path):
    run_on(layout_of(kind), check_torch_load, kind, str(tmp_path))


def check_torch_load(rank, layout, kind, root):
    run = start(kind)
    train(run, 0, 2)
    dcp.save(dmuon.state_dict(run.model, run.optimizer), checkpoint_id=f"{root}/dcp")
    want = whole(run)
    if rank == 0:
        dcp_to_torch_save(f"{root}/dcp", f"{root}/file")
        got = torch.load(f"{root}/file", weights_only=True)
        flat = dict(got["model"])
        for name, entry in got["optim"]["state"].items():
            flat |= {f"{name}: {key}": value for key, value in entry.items()}
        assert_same(flat, want)
        groups = {group["group_name"]: group for group in run.optimizer.param_groups}
        assert got["optim"]["param_groups"].keys() == groups.keys()
        torch_save_to_dcp(f"{root}/file", f"{root}/back")
    dist.barrier()
    train(run, 2, 3)
    state = dmuon.state_dict(run.model, run.optimizer)
    dcp.load(state, checkpoint_id=f"{root}/back")
    state.load_state_dict(state)
    assert_same(whole(run), want)

"""load_checkpoint into a training that is not quite the one that was saved."""

import dmuon
import torch

from tests.checkpoints.kinds import assert_same, start, train, whole
from tests.support.models import Net, in_blocks
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks


def with_buffer(buffer):
    def make():
        net = Net()
        net.register_buffer("scale", buffer)
        return net

    return {"make_model": make}


def refused(root, run, *words):
    """And nothing has moved."""
    train(run, 0, 1)
    before = whole(run)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    load = lambda: dmuon.load_checkpoint(root, run.model, run.optimizer)  # noqa: E731
    assert_all_raise(load, "ValueError", *words)
    assert_same(whole(run), before)
    assert [group["lr"] for group in run.optimizer.param_groups] == rates


def test_what_cannot_be_cast_is_named_before_anything_moves(tmp_path):
    run_ranks(check_dtypes, 2, str(tmp_path))


def check_dtypes(rank, world_size, root):
    for saved, mine in (("float32", "int64"), ("complex64", "float32"), ("int32", "bool")):
        run = start("fsdp2", with_buffer(torch.full((3,), 2.7).to(getattr(torch, saved))))
        dmuon.save_checkpoint(f"{root}/{saved}", 1, run.model, run.optimizer)
        other = start("fsdp2", with_buffer(torch.zeros(3, dtype=getattr(torch, mine))))
        refused(f"{root}/{saved}", other, f"'model.scale' is {saved} and not {mine}")
    wider = start("fsdp2", with_buffer(torch.zeros(3, dtype=torch.float64)))
    dmuon.load_checkpoint(f"{root}/int32", wider.model)
    assert wider.model.scale.tolist() == [2.0] * 3


def test_a_tensor_that_overlaps_itself_is_named_before_anything_moves(tmp_path):
    run_ranks(check_overlap, 2, str(tmp_path))


def check_overlap(rank, world_size, root):
    run = start("fsdp2", with_buffer(torch.ones(1, 3).expand(4, 3)))
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer)
    refused(root, run, "'model.scale' share memory", "contiguous_format")
    whole_one = start("fsdp2", with_buffer(torch.zeros(4, 3)))
    dmuon.load_checkpoint(root, whole_one.model, whole_one.optimizer)
    assert whole_one.model.scale.equal(torch.ones(4, 3))


def test_other_groups_are_refused_with_what_to_do(tmp_path):
    run_ranks(check_groups, 2, str(tmp_path))


def check_groups(rank, world_size, root):
    run = start("fsdp2")
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer)
    parameters = list(run.model.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    run.optimizer = dmuon.Muon(run.model, param_groups=groups)
    refused(root, run, "has no param group 'group0/", "group_name", "set_optimizer_state_dict")
    dmuon.save_checkpoint(f"{root}/bare", 1, run.model)
    refused(f"{root}/bare", run, "was saved without an optimizer. Load it without one")


# Frozen ----------------------------------------------------------------------------------------


def test_what_was_frozen_starts_anew_and_what_is_frozen_now_is_left_out(tmp_path):
    for kind, ranks in (("fsdp2", 2), ("ddp", 2)):
        run_ranks(check_frozen, ranks, str(tmp_path / kind), kind)


def check_frozen(rank, world_size, root, kind):
    """Of a matrix beside the dedicated ones, and of a dedicated one."""
    run = freeze(start(kind), True)
    train(run, 0, 2)
    dmuon.save_checkpoint(f"{root}/frozen", 2, run.model, run.optimizer)
    fresh, trained = start(kind), start(kind)
    train(trained, 0, 3)
    for each in (fresh, trained):
        dmuon.load_checkpoint(f"{root}/frozen", each.model, each.optimizer)
    assert_same(whole(trained), whole(fresh))
    for each in (fresh, trained):
        train(each, 2, 4)
    assert_same(whole(trained), whole(fresh))
    dmuon.save_checkpoint(f"{root}/trained", 4, trained.model, trained.optimizer)
    frozen = freeze(start(kind), True)
    dmuon.load_checkpoint(f"{root}/trained", frozen.model, frozen.optimizer)
    want = {k: v for k, v in whole(trained).items() if not k.startswith("inp.weight: ")}
    assert_same(whole(frozen), want)
    train(freeze(frozen, False), 4, 5)


def freeze(run, frozen):
    for weight in (run.model.inp.weight, run.model.blocks[0].up.weight):
        weight.requires_grad_(not frozen)
    return run


def test_state_that_is_there_in_part_is_an_error(tmp_path):
    run_ranks(check_partly, 1, str(tmp_path))


def check_partly(rank, world_size, root):
    """`up` is on Muon's side there, and on AdamW's here."""
    run = start("alone")
    dmuon.save_checkpoint(root, 1, run.model, run.optimizer)
    downs = lambda name, param: in_blocks(name, param) and "down" in name  # noqa: E731
    refused(root, start("alone", predicate=downs), "missing: 'optim.blocks.0.up.weight.step'")

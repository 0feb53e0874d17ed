"""Whatever happened to its files, a checkpoint loads whole or not at all, and what is wrong is named."""

import json
import os
from pathlib import Path

import dmuon
import pytest
import torch

from tests.checkpoints.kinds import assert_same, start, whole
from tests.support.models import Net
from tests.support.parity import assert_all_raise
from tests.support.ranks import run_ranks

BIG = {"make_model": lambda: Net(dims=((17, 29), (17, 18), (300, 1200)))}  # a matrix of > 1 block


def saved(root, *steps, kind="fsdp2"):
    run = start(kind)
    for step in steps:
        run.train(step)
        dmuon.save_checkpoint(root, step, run.model, run.optimizer, extra={"step": step})
    return run


def on_first_rank(rank, work, *args):
    if rank == 0:
        work(*args)
    torch.distributed.barrier()


def directory(root, step):
    return Path(root, f"step_{step:010d}")


def files_of(path):
    return sorted(p.name for p in path.iterdir())


# Bits ------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    run_ranks(check_bits, 1, str(tmp_path), limit_s=120.0)


def check_bits(rank, world_size, root):
    """In each file at the ends, at 60 places between them and on both sides of each tensor's ends."""
    run = saved(root, 1, 2, kind="alone")
    before, path = whole(run), directory(root, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    ends = [c["at"] for t in manifest["tensors"].values() for c in t["chunks"]]
    for name in files_of(path):
        content = (path / name).read_bytes()
        even = range(0, len(content), max(len(content) // 60, 1))
        places = {*even, *ends, *(e - 1 for e in ends), len(content) - 1} & set(range(len(content)))
        for place in sorted(places):
            flip(path / name, content, place, 1 << place % 8)
            with pytest.raises(ValueError, match="damaged") as info:
                dmuon.load_checkpoint(root, run.model, run.optimizer)
            assert str(path / name) in str(info.value) or name == "COMMIT", info.value
            assert "load_checkpoint(..., step=1)" in str(info.value)
        (path / name).write_bytes(content)
    assert_same(whole(run), before)
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 2


def flip(path, content, place, mask):
    damaged = bytearray(content)
    damaged[place] ^= mask
    path.write_bytes(damaged)


def test_the_checksum_sees_what_a_sum_alone_would_not():
    """Pages in another order or twice, holes, bytes past the last whole block, two flips of one column."""
    from dmuon.safe_storage import checksum

    torch.manual_seed(0)
    whole = bytearray(torch.randint(0, 256, (3_000_000,), dtype=torch.uint8).numpy().tobytes())
    page, block = 4096, 8 * 128 * 1021
    found = {checksum(memoryview(whole))}
    for change in (
        lambda b: swap(b, 0, page, page),
        lambda b: swap(b, 0, 8 * page, page),
        lambda b: swap(b, 0, block, block),
        lambda b: b.__setitem__(slice(page, 2 * page), b[:page]),
        lambda b: b.__setitem__(slice(page, 2 * page), bytes(page)),
        lambda b: b.__setitem__(-1, b[-1] ^ 1),
        lambda b: (b.__setitem__(0, b[0] ^ 1), b.__setitem__(8 * 1021, b[8 * 1021] ^ 1)),
    ):
        changed = bytearray(whole)
        change(changed)
        found.add(checksum(memoryview(changed)))
    assert len(found) == 8


def swap(b, first, second, length):
    b[first : first + length], b[second : second + length] = (
        b[second : second + length],
        b[first : first + length],
    )


def test_damage_is_the_same_error_on_all_ranks_and_changes_none(tmp_path):
    run_ranks(check_damage, 2, str(tmp_path))


def check_damage(rank, world_size, root):
    run = saved(root, 1, 2)
    run.train(3)
    before, path = whole(run), directory(root, 2)
    load = lambda: dmuon.load_checkpoint(root, run.model, run.optimizer)  # noqa: E731
    for name in files_of(path):
        content = (path / name).read_bytes()
        torch.distributed.barrier()
        for damage in (cut(1), cut(len(content) // 2), cut(len(content)), longer, os.remove):
            on_first_rank(rank, damage, path / name)
            assert_all_raise(load, "ValueError", str(path), "load_checkpoint(..., step=1)")
            on_first_rank(rank, (path / name).write_bytes, content)
    assert_same(whole(run), before)
    on_first_rank(rank, swap_files, path / "rank0.data", path / "rank1.data")
    assert_all_raise(load, "ValueError", "rank", ".data is damaged")
    on_first_rank(rank, (directory(root, 1) / "rank0.data").write_bytes, b"")
    assert_all_raise(load, "ValueError", "No other checkpoint there is whole")
    assert_same(whole(run), before)


def cut(size):
    return lambda path: os.truncate(path, path.stat().st_size - size)


def longer(path):
    with open(path, "ab") as file:
        file.write(b"\0")


def swap_files(a, b):
    a.rename(f"{a}.tmp"), b.rename(a), Path(f"{a}.tmp").rename(b)

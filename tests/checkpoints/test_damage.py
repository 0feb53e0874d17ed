"""Whatever happened to its files, a checkpoint loads whole or not at all, and what is wrong is named."""

import hashlib
import json
import os
import pickle
import shutil
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


# Manifests -------------------------------------------------------------------------------------


def test_a_manifest_is_read_only_if_it_makes_sense(tmp_path):
    run_ranks(check_manifests, 1, str(tmp_path))


def check_manifests(rank, world_size, root):
    """Signed anew each time, as by somebody who wants it loaded."""
    run = saved(root, 1, kind="alone")
    before, path = whole(run), directory(root, 1)
    good = json.loads((path / "manifest.json").read_text())
    name = next(n for n, t in good["tensors"].items() if len(t["size"]) == 2)
    for change, word in (
        (put("format", 2), "has format 2; this dmuon reads 1"),
        (put("format", None), "has format None"),
        (put("surprise", 1), "surprise"),
        (lambda m: m.pop("extra"), "has the keys"),
        (put("files", {"../x": 1}), "'../x', which is not a file of its directory"),
        (put("files", {"/etc/passwd": 1}), "'/etc/passwd', which is not"),
        (put("files", {"..": 1}), "'..', which is not"),
        (put("files", {"": 1}), "'', which is not"),
        (put("files", {"a\0b": 1}), "which is not"),
        (put("files", {}), "which it does not list"),
        (put("files", []), "which it does not list"),
        (put("tensors", {}), "has other bytes in 'rank0.data' than its tensors"),
        (put("tensors", [1]), "is no manifest"),
        (edit(name, "dtype", "load"), "the dtype 'load', which torch has not"),
        (edit(name, "dtype", "float64"), "and not at"),
        (edit(name, "size", [2**62, 2**62]), "do not make up"),
        (edit(name, "size", [-1, 1]), "do not make up"),
        (edit(name, "chunks", []), "do not make up"),
        (piece(name, "at", 2**63), "and not at"),
        (piece(name, "at", -16), "no whole numbers"),
        (piece(name, "file", "rank7.data"), "'rank0.data', and not at"),
        (piece(name, "offsets", [0, 2**60]), "do not make up"),
        (piece(name, "checksum", 0), "another checksum"),
        (piece(name, "at", 0.0), "no whole numbers"),
        (piece(name, "sizes", [1.0, 2]), "no whole numbers"),
        (edit(name, "size", [17.0, 29.0]), "do not make up"),
        (put("step", "1"), "the step '1'"),
        (put("ranks", None), "the ranks None"),
        (put("extra", "[1]"), "no dictionaries"),
        (put("extra", '{"<tensor>": ["load", [1], ""]}'), "which torch has not"),
        (put("extra", '{"<tensor>": ["float32", [3], "AAAA"]}'), "bytes are not [3]"),
        (put("groups", "[]"), "no dictionaries"),
        (put("groups", '{"default/muon": 5}'), "no dictionaries"),
        (put("groups", "{}"), "was saved without an optimizer"),
        (group(good, lr=float("nan")), "lr of 'default/muon' is nan"),
        (group(good, lr="0.1"), "lr '0.1' in param group 'default/muon'"),
        (group(good, momentum=None), "momentum None in param group"),
        (group(good, betas=0.5), "betas 0.5 in param group 'default/muon'; it must be two numbers"),
        (group(good, betas=[0.9]), "betas of 'default/muon' are [0.9]"),
    ):
        changed = json.loads(json.dumps(good))
        change(changed)
        sign(path, json.dumps(changed).encode())
        refused(root, run, word)
    for text in (b"[]", b"{", b"\xff\xfe", b"null", b"[" * 10_000):
        sign(path, text)
        refused(root, run, "manifest.json")
    assert_same(whole(run), before)


def put(key, value):
    return lambda manifest: manifest.__setitem__(key, value)


def edit(name, key, value):
    return lambda manifest: manifest["tensors"][name].__setitem__(key, value)


def piece(name, key, value):
    return lambda manifest: manifest["tensors"][name]["chunks"][0].__setitem__(key, value)


def group(good, **settings):
    groups = json.loads(good["groups"])
    groups["default/muon"] |= settings
    return put("groups", json.dumps(groups))


def sign(path, text):
    (path / "manifest.json").write_bytes(text)
    (path / "COMMIT").write_text(hashlib.sha256(text).hexdigest())


def refused(root, run, word):
    with pytest.raises(ValueError) as info:
        dmuon.load_checkpoint(root, run.model, run.optimizer)
    assert word in str(info.value), info.value


def test_a_link_out_of_the_directory_is_not_followed(tmp_path):
    run_ranks(check_links, 1, str(tmp_path))


def check_links(rank, world_size, root):
    run = saved(root, 1, kind="alone")
    data = directory(root, 1) / "rank0.data"
    shutil.move(data, f"{root}/elsewhere")
    data.symlink_to(f"{root}/elsewhere")
    refused(root, run, "which is not a file of its directory")


def test_what_a_file_has_in_it_is_never_executed(tmp_path):
    run_ranks(check_payload, 1, str(tmp_path))


class Payload:
    def __reduce__(self):
        return os.mkdir, (f"{os.environ['DMUON_PAYLOAD']}",)


def check_payload(rank, world_size, root):
    """A pickle that makes a directory, in the place of every file; once with a manifest that vouches for it."""
    from dmuon.safe_storage import checksum

    run = saved(root, 1, kind="alone")
    os.environ["DMUON_PAYLOAD"] = f"{root}/executed"
    path, payload = directory(root, 1), pickle.dumps(Payload())
    manifest = json.loads((path / "manifest.json").read_text())
    tensor = next(t for t in manifest["tensors"].values() if len(t["size"]) == 2)
    chunk = tensor["chunks"][0]
    for name in files_of(path):
        content = (path / name).read_bytes()
        (path / name).write_bytes(payload + content[len(payload) :])
        refused(root, run, str(path))
        (path / name).write_bytes(content)
    size = -(-4 * tensor["size"][0] * tensor["size"][1] // 16) * 16
    content = bytearray((path / "rank0.data").read_bytes())
    content[chunk["at"] : chunk["at"] + len(payload)] = payload
    chunk["checksum"] = checksum(memoryview(content)[chunk["at"] : chunk["at"] + size])
    (path / "rank0.data").write_bytes(content)
    sign(path, json.dumps(manifest).encode())
    assert dmuon.load_checkpoint(root, run.model, run.optimizer).step == 1
    assert not os.path.exists(f"{root}/executed")

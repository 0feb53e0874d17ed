"""A manifest is data of somebody else's: it is read only if it makes sense, and names nothing but its own files."""

import hashlib
import json
import os
import pickle
import shutil
import zlib
from unittest import mock

import dmuon
import pytest
from dmuon import manifest

from tests.checkpoints.kinds import assert_same, whole
from tests.checkpoints.test_damage import directory, files_of, saved
from tests.support.ranks import run_ranks


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


def test_the_pieces_are_looked_up_once_for_all_files(tmp_path):
    """Of 40 files with 50 pieces each; walking through all of them for each file took minutes at 256 ranks."""
    ranks, names = range(40), [f"t{i}" for i in range(50)]
    chunks = [
        {
            "offsets": [4 * r],
            "sizes": [4],
            "file": f"rank{r}.data",
            "checksum": zlib.crc32(bytes(16)),
        }
        for r in ranks
    ]
    tensors = {
        name: {"dtype": "float32", "size": [160], "chunks": [c | {"at": 16 * i} for c in chunks]}
        for i, name in enumerate(names)
    }
    files = {f"rank{r}.data": 16 * len(names) for r in ranks}
    settings = {"step": 1, "ranks": 40, "groups": "{}", "extra": "{}"}
    manifest.write_manifest(tmp_path, settings | {"tensors": tensors, "files": files}, 1)
    with mock.patch.object(manifest, "bytes_of", side_effect=manifest.bytes_of) as asked:
        content = manifest.read_manifest(tmp_path)
        assert asked.call_count == len(ranks) * len(names)
        for name, size in files.items():
            (tmp_path / name).write_bytes(bytes(size))
        assert manifest.damage(tmp_path, content, files) == ""
        assert asked.call_count == 2 * len(ranks) * len(names)
    (tmp_path / "rank7.data").write_bytes(bytes(16 * 49) + b"1" + bytes(15))
    assert "rank7.data is damaged: 't49'" in manifest.damage(tmp_path, content, files)


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

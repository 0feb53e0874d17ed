"""`python -m dmuon`: plans of models that nobody has allocated, and what the machine can do."""

import json
import math
import os
import struct
import subprocess
import sys
import time

import pytest
from dmuon import planning
from dmuon.__main__ import main

from tests.support.ranks import PATIENCE, ROOT

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
IN_A_LAYER = 7  # q, k, v, o, gate, up, down


def net():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def raising():
    raise RuntimeError("boom\nand more")


def of_no_model():
    return 3


def of_vectors():
    import torch

    return torch.nn.LayerNorm(4)


no_function = 4


def write_safetensors(path, header):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(200))
    return str(path)


@pytest.fixture
def safetensors(tmp_path):
    header = {
        "model.layers.0.up.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
        "model.layers.0.norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [64, 72]},
        "model.embed.weight": {"dtype": "BF16", "shape": [16, 4], "data_offsets": [72, 200]},
        "__metadata__": {"format": "pt"},
    }
    return write_safetensors(tmp_path / "model.safetensors", header)


def planned(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def test_a_config_gives_the_matrices_of_its_layers(capsys, config):
    found = planned(capsys, config, "shard=4")
    assert found["matrices"] == IN_A_LAYER * LLAMA["num_hidden_layers"]
    assert found["units"] == LLAMA["num_hidden_layers"]
    assert not any("embed" in name or "lm_head" in name for name in found["owners"])


def test_every_matrix_has_an_owner_and_every_load_is_counted_once(capsys, config):
    found = planned(capsys, config, "replicate=2 shard=3 tp=2")
    assert found["ranks"] == 12 == len(found["loads"]) == len(found["state_bytes"])
    assert all(0 <= owner < 12 for owner in found["owners"].values())
    alone = planned(capsys, config, "")
    assert math.isclose(sum(found["loads"]), sum(alone["loads"]))


def test_bytes_are_those_of_the_channels(capsys, config):
    weights = 2 * planned(capsys, config, "")["dedicated"]  # bfloat16
    assert planned(capsys, config, "")["bytes_per_step"] == {}
    assert planned(capsys, config, "shard=4")["bytes_per_step"] == {
        "materialise": 2 * 3 * weights,
        "reduce": 3 * 2 * weights,
    }
    assert planned(capsys, config, "replicate=3")["bytes_per_step"] == {
        "replicate_reduce": 2 * 2 * weights,
        "publish": 2 * weights,
    }


def test_safetensors_are_read_without_their_data(capsys, safetensors):
    found = planned(capsys, safetensors, "shard=2")
    assert found["owners"].keys() == {"model.layers.0.up.weight"}
    assert found["parameters"] == 4 * 8 + 4 + 16 * 4


def test_a_directory_and_a_function_are_models_too(capsys, config, tmp_path):
    assert planned(capsys, str(tmp_path), "shard=2")["matrices"] == 21
    assert planned(capsys, "tests.test_planner:net", "shard=2", "--include", "*")["matrices"] == 2


def test_globs_choose(capsys, config):
    found = planned(capsys, config, "shard=2", "--include", "*_proj", "--exclude", "*.down_proj")
    assert found["matrices"] == 6 * 3


def test_ten_thousand_ranks(capsys, config):
    found = planned(capsys, config, "replicate=100 shard=100")
    assert found["ranks"] == 10_000 and sum(load > 0 for load in found["loads"]) == 21


def test_the_table_and_the_picture(capsys, config, tmp_path):
    picture = tmp_path / "plan.svg"
    assert main(["plan", config, "shard=4", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    for word in ("4 ranks", "W*", "of the mean", "materialise", "load by rank"):
        assert word in text
    assert "TFLOP per step" in picture.read_text()


def test_the_memory_limit_is_kept_or_refused(capsys, config):
    least = max(planned(capsys, config, "shard=2")["state_bytes"])
    assert "memory" in refused(capsys, config, "shard=2", "--memory-limit", str(least / 1e10))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{config}", "shrad=4"], ["shrad", "did you mean 'shard'"]),
        (["{config}", "shard=0"], ["shard", "'0'", "at least 1"]),
        (["{config}", "shard=-4"], ["shard", "'-4'", "at least 1"]),
        (["{config}", "shard=x"], ["shard", "'x'"]),
        (["{config}", "shard"], ["shard is ''"]),
        (["{config}", "shard=2 shard=4"], ["shard twice"]),
        (["{config}", "shard=3000000000"], ["3000000000 ranks", "1000000"]),
        (["{config}", "shard=100000000000000000000"], ["ranks", "1000000"]),
        (["{config}", "shard=4 tp=2", "--ranks", "16"], ["8 ranks", "--ranks is 16"]),
        (
            ["{config}", "shard=4", "--include", "*.nope"],
            ["nothing is chosen", "q_proj.weight' (3)"],
        ),
        (["{config}", "shard=4", "--picture", "nowhere/p.png"], ["nowhere/p.png", "No such file"]),
        (["{config}", "shard=4", "--picture", "p.nope"], ["nope", ".png, .svg or .pdf"]),
        (["", "shard=4"], ["''", "config.json", "module:function"]),
        (["nowhere.bin", "shard=4"], ["nowhere.bin", "config.json", ".safetensors"]),
        (["nowhere.json", "shard=4"], ["nowhere.json", "is not there"]),
        (["nowhere.safetensors", "shard=4"], ["nowhere.safetensors", "is not there"]),
        (["no_module:f", "shard=4"], ["no_module:f", "cannot be imported"]),
        (["tests.test_planner:nope", "shard=4"], ["no function 'nope'"]),
        (["tests.test_planner:no_function", "shard=4"], ["no function 'no_function'"]),
        (["tests.test_planner:", "shard=4"], ["write module:function"]),
        (["tests.test_planner:raising", "shard=4"], ["raising", "RuntimeError: boom\n"]),
        (["tests.test_planner:of_no_model", "shard=4"], ["of_no_model", "int", "torch.nn.Module"]),
        (["tests.test_planner:of_vectors", "shard=4"], ["none of the 2 parameters", "two dims"]),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(capsys, config, arguments, words):
    text = refused(capsys, *(a.format(config=config) for a in arguments))
    assert not [word for word in words if word not in text], text


@pytest.mark.parametrize("value", ["x", "nan", "-1", "0", ""])
@pytest.mark.parametrize(
    "option, wanted",
    [
        ("--ranks", "whole number of at least 1"),
        ("--max-owners-per-group", "whole number of at least 1"),
        ("--memory-limit", "number above 0"),
    ],
)
def test_options_are_checked_where_they_are_read(capsys, config, option, value, wanted):
    with pytest.raises(SystemExit) as ended:
        main(["plan", config, "shard=4", option, value])
    text = f"argument {option}: {value!r} is given; it must be a {wanted}"
    assert ended.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("config.json", b"{", ["is no JSON"]),
        ("config.json", b"", ["is no JSON"]),
        ("config.json", b"[1]", ["list", "object"]),
        ("config.json", b'{"a": 1}', ["config.json", "model_type"]),
        ("config.json", b'{"model_type": "nosuch"}', ["config.json", "nosuch"]),
        ("x.safetensors", b"abc", ["no .safetensors file"]),
        ("x.safetensors", (10**15).to_bytes(8, "little"), ["header", "1000000000000000 bytes"]),
        ("x.safetensors", b"\x0b" + bytes(7) + b'{"a": {}}  ', ["no .safetensors file"]),
        ("x.safetensors.index.json", b"{}", ["weight_map"]),
        ("x.safetensors.index.json", b'{"weight_map": {"a": "1.safetensors"}}', ["1.safetensors"]),
    ],
)
def test_a_damaged_file_is_named(capsys, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    text = refused(capsys, str(tmp_path / name), "shard=2")
    assert not [word for word in [name, *words] if word not in text], text
    assert text.count("\n") == 1, "one line, no traceback"


@pytest.mark.parametrize("what", ["", "model.safetensors.index.json"])
def test_shards_and_their_index_are_one_model(capsys, tmp_path, what):
    """Whatever the floating-point type; files that the index does not name are another model's."""
    files = {name: f"{i}.safetensors" for i, name in enumerate(("a.0.w", "a.1.w"))}
    for (name, file), dtype in zip(files.items(), ("BF16", "F8_E4M3"), strict=True):
        entry = {"dtype": dtype, "shape": [4, 8], "data_offsets": [0, 64]}
        write_safetensors(tmp_path / file, {name: entry, f"{name}.ids": {**entry, "dtype": "I64"}})
    write_safetensors(tmp_path / "consolidated.safetensors", {"b.0.w": entry})
    index = {"weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert planned(capsys, str(tmp_path / what), "shard=2")["owners"].keys() == files.keys()


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    "config, matrices",
    [
        (
            {
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
            },
            2 * 4,
        ),
        ({**SMALL, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, 2 * 6),
        # q, k, v, o, the router, and two stacks of experts
        ({**SMALL, "model_type": "mixtral", "num_local_experts": 4}, 2 * 7),
        (
            {
                "model_type": "t5",
                "architectures": ["T5ForConditionalGeneration"],
                "d_model": 32,
                "num_layers": 2,
            },
            None,
        ),
        (
            {
                "model_type": "qwen2_vl",
                "architectures": ["Qwen2VLForConditionalGeneration"],
                "text_config": {
                    **SMALL,
                    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
                },
                "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32},
            },
            None,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_architectures(capsys, tmp_path, config, matrices):
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = planned(capsys, str(tmp_path), "shard=2")
    assert found["matrices"] == (matrices or found["matrices"])
    assert found["units"] >= 2
    if config["model_type"] == "qwen2_vl":
        assert any("visual" in name for name in found["owners"]), "the image tower trains too"


def test_a_reader_that_has_read_enough_ends_it_quietly(config):
    """As `head` does: a pipe with nobody at its other end."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [
        sys.executable,
        "-m",
        "dmuon",
        "plan",
        "tests.test_planner:net",
        "shard=2",
        "--include",
        "*",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60 * PATIENCE
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_large_plan_takes_seconds(capsys, tmp_path):
    """As many matrices as a large mixture of experts has, each a tensor of its own."""
    entry = {"dtype": "BF16", "shape": [2048, 7168], "data_offsets": [0, 0]}
    names = [f"layers.{i}.experts.{j}.up" for i in range(60) for j in range(256)]
    path = write_safetensors(tmp_path / "x.safetensors", dict.fromkeys(names, entry))
    start = time.process_time()
    found = planned(capsys, path, "replicate=10 shard=100 tp=10")
    assert found["ranks"] == 10_000 and found["matrices"] == len(names)
    assert time.process_time() - start < 30


def test_an_empty_topology_is_one_rank():
    assert planning.read_topology("") == {"replicate": 1, "shard": 1, "tp": 1}


def test_the_doctor_finds_nothing_wrong(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found["self-test"] == "two processes train as one"
    assert "gloo" in found["backends"] and found["torch"].startswith("2.")

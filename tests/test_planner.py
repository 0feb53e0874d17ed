"""`python -m dmuon`: plans of models that nobody has allocated, and what the machine can do."""

import json
import math
import struct

import pytest
from dmuon import planning
from dmuon.__main__ import main

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


@pytest.fixture
def safetensors(tmp_path):
    header = {
        "model.layers.0.up.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
        "model.layers.0.norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [64, 72]},
        "model.embed.weight": {"dtype": "BF16", "shape": [16, 4], "data_offsets": [72, 200]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(200))
    return str(path)


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
        (["{config}", "shard=x"], ["shard", "'x'"]),
        (["{config}", "shard=4 tp=2", "--ranks", "16"], ["8 ranks", "--ranks is 16"]),
        (["{config}", "shard=4", "--include", "*.nope"], ["nothing is chosen", "q_proj"]),
        (["nowhere.bin", "shard=4"], ["nowhere.bin", "config.json", ".safetensors"]),
        (["no_module:f", "shard=4"], ["no_module:f", "cannot be imported"]),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(capsys, config, arguments, words):
    text = refused(capsys, *(a.format(config=config) for a in arguments))
    assert not [word for word in words if word not in text], text


def test_an_empty_topology_is_one_rank():
    assert planning.read_topology("") == {"replicate": 1, "shard": 1, "tp": 1}


def test_the_doctor_finds_nothing_wrong(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found["self-test"] == "two processes train as one"
    assert "gloo" in found["backends"] and found["torch"].startswith("2.")

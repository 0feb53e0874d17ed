"""`dmuon.toml` sets up what the keyword arguments would."""

import dmuon
import pytest
import torch

from tests.support.ddp import setup_ddp
from tests.support.meshes import flat
from tests.support.models import Net, shard
from tests.support.parity import assert_all_raise, full_weights, mean_square, regression, setup
from tests.support.ranks import run_ranks
from tests.support.weights import assert_same

FILE = """
[runtime]
include = ["blocks.*"]
exclude = ["*.norm", "*.bias"]
owner_strategy = "round_robin"

[muon]
lr = 0.05
momentum = 0.9

[adamw]
lr = 0.002
betas = [0.8, 0.99]

[newton_schulz]
steps = 4
coefficients = "you"

[policy]
defaults = {grad_dtype = "float32"}
"""
KEYWORDS = {
    "lr": 0.05,
    "momentum": 0.9,
    "adamw_lr": 0.002,
    "adamw_betas": (0.8, 0.99),
    "ns_steps": 4,
    "ns_backend": dmuon.NewtonSchulz(coefficients=dmuon.YOU_COEFFICIENTS),
}


@pytest.fixture
def path(tmp_path):
    return written(tmp_path, "fsdp2")


def written(folder, kind):
    path = folder / "dmuon.toml"
    path.write_text(FILE.replace("[runtime]", f'[runtime]\nkind = "{kind}"'))
    return str(path)


def steps(model, optimizer, rank, size):
    for step in range(2):
        x, y = (t.chunk(size)[rank] for t in regression(torch.Generator().manual_seed(step)))
        mean_square(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_file_and_the_keywords_train_the_same_bits(tmp_path, kind):
    run_ranks(check_same, 2, written(tmp_path, kind), kind)


def check_same(rank, size, path, kind):
    make = setup if kind == "fsdp2" else setup_ddp
    settings = {
        "owner_strategy": "round_robin",
        "param_policy": {"defaults": {"grad_dtype": "float32"}},
    }
    by_hand = make(flat(size), dedicate=settings, muon=KEYWORDS)
    want = steps(by_hand.model, by_hand.optimizer, rank, size)
    torch.manual_seed(7)
    model, mesh = Net(), flat(size).mesh()
    made = dmuon.from_config(path, model, mesh)
    shard(model, mesh) if kind == "fsdp2" else made.replicate()
    assert_same(steps(model, made.optimizer(), rank, size), want)
    assert made.owners == {p.fqn: p.owner_rank for p in dmuon.get_dedicated_params(by_hand.model)}


def test_code_beats_the_file_and_the_file_beats_the_environment(path, monkeypatch):
    monkeypatch.setenv("DMUON_MUON_LR", "0.5")
    monkeypatch.setenv("DMUON_MUON_WEIGHT_DECAY", "0.1")
    monkeypatch.setenv("DMUON_MUON_NONFINITE", "skip")
    found = dmuon.load_config(path)["muon"]
    assert found == {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nonfinite": "skip"}


def test_the_environment_may_name_the_file(path, monkeypatch):
    monkeypatch.setenv("DMUON_CONFIG", path)
    assert dmuon.load_config() == dmuon.load_config(path)


def test_what_the_environment_says_is_checked(monkeypatch):
    monkeypatch.setenv("DMUON_MUON_LR", "fast")
    with pytest.raises(ValueError, match="DMUON_MUON_LR"):
        dmuon.load_config()


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("DMUON_MUON_LRR", "1", ["which is unknown", "did you mean 'DMUON_MUON_LR'"]),
        (
            "DMUON_MUON_LR",
            "0.1\nmomentum = 0.5",
            ["DMUON_MUON_LR", "it must be printable"],
        ),
        ("DMUON_MUON_LR", "", ["DMUON_MUON_LR"]),
        (
            "DMUON_RUNTIME_KIND",
            'a "quoted\\ kind',
            ["DMUON_RUNTIME_KIND: runtime.kind is", "quoted"],
        ),
        ("DMUON_MOUN_LR", "1", ["which is unknown", "did you mean 'DMUON_MUON_LR'"]),
        ("DMUON_ADAMW_LR", "-1", ["DMUON_ADAMW_LR: adamw.lr is -1", "at least 0"]),
        ("DMUON_POLICY_DEFAULTS", '{route = "moun"}', ["policy.defaults.route is 'moun'"]),
        ("DMUON_CONFIG", "nowhere.toml", ["DMUON_CONFIG: 'nowhere.toml' is no file"]),
        ("DMUON_CONFG", "nowhere.toml", ["did you mean 'DMUON_CONFIG'"]),
        ("DMUON_CHECKPOINT_DIRECTORY", "a\udcff", ["printable UTF-8"]),
    ],
)
def test_a_variable_that_says_nothing_good_is_an_error(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        dmuon.load_config()
    assert not [w for w in words if w not in str(caught.value)], caught.value


@pytest.mark.parametrize("path", ["nowhere.toml", "", "."])
def test_a_path_without_a_file_is_an_error(path):
    with pytest.raises(ValueError, match="is no file"):
        dmuon.load_config(path)


@pytest.mark.parametrize("start, end", [(b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n")])
def test_files_of_other_editors_are_read_and_their_lines_counted(tmp_path, start, end):
    path = tmp_path / "dmuon.toml"
    path.write_bytes(start + end.join([b"[muon]", b"lr = 0.5", b""]))
    assert dmuon.load_config(path) == {"muon": {"lr": 0.5}}
    path.write_bytes(start + end.join([b"[muon]", b"lr = 0.5", b"lrr = 1", b""]))
    with pytest.raises(ValueError, match=":3: 'lrr'"):
        dmuon.load_config(path)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[muon]\nlr = 1\nlr = 2\n", [":3:", "lr"]),
        ("[muon]\nlr = 1\n[muon]\nmomentum = 1\n", [":3:", "muon"]),
        ("[Muon]\nlr = 1\n", [":1:", "did you mean 'muon'"]),
        ("lr = 1\n", [":1:", "'lr' is no known section"]),
        ("[[muon]]\nlr = 1\n", ["write [muon]"]),
        ("[adamw]\nbetas = [1, 2, 3]\n", [":2:", "a list of two numbers"]),
        ("[runtime]\ninclude = 'x'\n", [":2:", "a list of strings"]),
        ("[runtime]\nkind = 'fsdp'\n", ["runtime.kind", "'fsdp2'"]),
        ("[newton_schulz]\ncoefficients = 'yu'\n", ["newton_schulz.coefficients", "'you'"]),
        ("[muon]\nlr = 0.1 # \udcff\n", [":2:", "utf-8"]),
        ("[muon]\nmomentun = 1\n", [":2:", "momentun", "did you mean 'momentum'"]),
        ("[muon]\nlr = true\n", [":2:", "muon.lr", "a number"]),
        ("[muon\n", [":1:"]),
    ],
)
def test_errors_name_file_line_and_key(tmp_path, text, words):
    path = tmp_path / "wrong.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError) as caught:
        dmuon.load_config(path)
    assert not [w for w in ["wrong.toml", *words] if w not in str(caught.value)], caught.value


def test_a_configuration_without_a_selection_says_what_to_write(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    with pytest.raises(ValueError, match=r'include = \["\*_proj"\]'):
        dmuon.from_config(path, torch.nn.Linear(2, 2), None)


def test_what_a_section_cannot_have_together_is_named_with_its_file(tmp_path):
    path = tmp_path / "dmuon.toml"
    path.write_text('[[policy.overrides]]\nname = "a"\n')
    with pytest.raises(ValueError, match=r"\[policy\] of .*dmuon\.toml: .*'name' and 'set'"):
        dmuon.load_config(path)
    path.write_text('[runtime]\nkind = "ddp"\nreshard_after_forward = true\n')
    with pytest.raises(
        ValueError, match=r'reshard_after_forward of .*dmuon\.toml is for kind = "fsdp2"'
    ):
        dmuon.load_config(path)


def test_what_is_wrong_on_one_rank_is_told_to_all(path, tmp_path):
    run_ranks(check_one_wrong, 2, path, str(tmp_path / "other.toml"))


def check_one_wrong(rank, size, path, other):
    mesh = flat(size).mesh()

    def from_config(mine, **code):
        return lambda: dmuon.from_config(mine, Net(), mesh, **code)

    wrong = other if rank else path
    assert_all_raise(from_config(wrong), "ValueError", "other.toml' is no file")
    code = {"owner_strateg": "lpt"} if rank else {}
    assert_all_raise(from_config(path, **code), "ValueError", "did you mean 'owner_strategy'")


def test_variables_of_others_are_left_alone(monkeypatch):
    for name in ("DMUON_ISA", "DMUON_HOME", "DMUON_TEST_PATIENCE", "DMUON"):
        monkeypatch.setenv(name, "anything")
    assert dmuon.load_config() == {}

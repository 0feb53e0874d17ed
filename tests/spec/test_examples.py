"""Each file of examples/spec/ on several ranks, to its end, against one process."""

import re
import runpy
import subprocess
import sys

import pytest
import torch

from tests.spec.running import (
    EXAMPLES,
    OneProcess,
    compare,
    references,
    run_example,
)
from tests.support.oracle import assert_weights_close
from tests.support.ranks import PATIENCE
from tests.support.weights import assert_same

STEPS = 4
MATRICES = 14  # two layers of seven


@pytest.fixture(scope="module")
def trained():
    """The training that most of the files do, in float64 and in float32."""
    return [reference.train(range(STEPS)) for reference in references()]


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("custom_loop", 3),
        ("tensor_parallel", 4),
        ("hsdp_tensor_parallel", 8),
        ("ddp_tensor_parallel", 4),
    ],
)
def test_training_is_that_of_one_process(name, ranks, trained, tmp_path):
    first, *others = run_example(name, ranks, tmp_path)
    compare(first.losses, first.values["weights"], *trained, STEPS)
    assert first.losses[-1] < first.losses[0], "nothing was learned"
    assert_shows_losses(first, others)


def assert_shows_losses(first, others):
    shown = [float(loss) for loss in re.findall(r"loss (\S+)", first.printed)]
    assert shown == pytest.approx(first.losses, abs=1e-6)
    assert not any(other.printed for other in others), "not only the first rank prints"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_publishing_in_step_and_beside_the_forward_give_the_same_bits(tp_size, trained, tmp_path):
    first = run_example("sync_async", 4, tmp_path, str(tp_size))[0]
    compare(first.losses, first.values["weights"], *trained, STEPS)
    assert_same(first.values["weights"], first.values["weights_again"])
    assert first.losses == first.values["losses_again"]
    assert "bit for bit: True" in first.printed


def test_accumulation_and_a_checkpoint_amid_updates(trained, tmp_path):
    """Four micro-batches are one large batch."""
    first, *others = run_example("manual_overrides", 4, tmp_path)
    assert not any(other.values["model_sd"] for other in others), "the first rank gets it"
    exact, plain = (reference.train(range(2)) for reference in references())
    assert_weights_close(first.values["model_sd"], exact.weights, plain.weights, 2)
    losses, micro = first.losses[:2], first.losses[2:]
    losses += [sum(micro[i : i + 4]) / 4 for i in (0, 4)]
    compare(losses, first.values["weights"], *trained, STEPS)


def test_a_loaded_checkpoint_trains_on_with_the_same_bits(trained, tmp_path):
    first = run_example("checkpoint_save", 4, tmp_path)[0]
    exact, plain = trained
    assert_weights_close(first.values["weights"], exact.weights, plain.weights, STEPS)
    assert_same(first.values["weights_again"], first.values["weights"])
    assert first.values["losses_again"] == first.losses
    assert "the same losses: True" in first.printed
    saved = torch.load(tmp_path / "out/spec/checkpoint.pt")
    assert saved["model"].keys() == exact.weights.keys()
    assert saved["optim"]


LINE = re.compile(
    r"(\S+): local=\((\d+), (\d+)\), full=\((\d+), (\d+)\), shard_dim=(\S+), "
    r"is_tp_owner=(\S+), tp_group_size=(\d+)"
)


def listed(ran):
    """By name, what each of the ranks that list it shows."""
    by_name = {}
    for text in "".join(each.printed for each in ran).splitlines():
        name, *shown = LINE.fullmatch(text).groups()
        by_name.setdefault(name, []).append(shown)
    assert len(by_name) == MATRICES
    return by_name


def test_both_tensor_parallel_ranks_of_an_owner_list_a_matrix(tmp_path):
    for name, shown in listed(run_example("inspection", 4, tmp_path)).items():
        dim = int("o_proj" in name or "down_proj" in name)
        for *sizes, shard_dim, _, ranks in shown:
            local, full = ([int(size) for size in pair] for pair in (sizes[:2], sizes[2:]))
            full[dim] //= 2
            assert (local, shard_dim, ranks) == (full, str(dim), "2"), name
        assert sorted(is_owner for *_, is_owner, _ in shown) == ["False", "True"], name


def test_without_tensor_parallelism_the_owner_alone_does(tmp_path):
    for name, shown in listed(run_example("inspection", 2, tmp_path, "1")).items():
        ((rows, cols, *full, dim, is_owner, ranks),) = shown
        assert ([rows, cols], dim, is_owner, ranks) == (full, "None", "True", "1"), name


def test_a_llama_in_bfloat16(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    first = run_example("hf_dmuon", 2, tmp_path, limit_s=90)[0]
    exact, plain = (
        llama(dtype).train(range(STEPS), loss_of=of_labels)
        for dtype in (torch.float64, torch.bfloat16)
    )
    compare(first.losses, first.values["weights"], exact, plain, STEPS)


def llama(dtype):
    """What the listing loads: bfloat16 weights."""
    from setting import predicate, tiny_llama
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.bfloat16)
    return OneProcess(model.to(dtype), predicate)


def of_labels(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_from_its_config(stage, trained, tmp_path):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    config = tmp_path / "config.json"
    text = (EXAMPLES / "ds_config.json").read_text()
    config.write_text(re.sub(r'"stage": \d', f'"stage": {stage}', text))
    first = run_example("deepspeed_dmuon", 2, tmp_path, str(config), limit_s=90)[0]
    compare(first.losses, first.values["weights"], *trained, STEPS)


def test_torchrun_runs_one_as_a_newcomer_would(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    ended = subprocess.run(
        [*command, str(EXAMPLES / "custom_loop.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    assert len(re.findall("loss", ended.stdout)) == STEPS


@pytest.mark.parametrize("ranks", ["2", "6"])
def test_a_world_that_the_mesh_does_not_divide_is_named(ranks, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    says = rf"WORLD_SIZE is {ranks}, .* give torchrun --nproc-per-node 4, or a multiple of it"
    with pytest.raises(SystemExit, match=says):
        runpy.run_path(str(EXAMPLES / "hsdp_tensor_parallel.py"))

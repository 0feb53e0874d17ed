"""examples/train_gpt_zero.py with its JSON files, on a smaller model and few steps."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mesh.test_example_3d import largest_difference, small_recipe
from tests.support.ranks import ROOT, run_fresh

sys.path.append(str(ROOT / "examples"))

STAGES = range(4)
SCRIPT = """
import os
os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun does
from tests.zero.test_example import train_all
train_all({!r})
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By optimizer: training losses by stage and of one process, and the tolerance of the examples."""
    folder = tmp_path_factory.mktemp("examples")
    run_fresh(SCRIPT.format(str(folder)), 2, limit_s=180.0)
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize("optimizer", ["dmuon", "adamw"])
def test_every_stage_and_one_process_have_one_curve(trained, optimizer):
    stages, single, tolerance = trained[optimizer]
    assert single[-1] < single[0] - 0.1, "the model learns"
    assert len(stages) == len(STAGES)
    for stage, losses in zip(STAGES, stages, strict=True):
        assert largest_difference(losses, single) <= tolerance, f"stage {stage}"


def train_all(folder):
    import torch.distributed as dist
    import train_gpt_zero as example
    from corpus import load_corpus

    example.start_processes()
    corpus = load_corpus()
    told = {name: train_stages(name, corpus, Path(folder)) for name in ("dmuon", "adamw")}
    if dist.get_rank() == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(told))
    dist.barrier()  # the other waits here for the first


def train_stages(name, corpus, folder):
    """The first rank checks the weights after three steps, too."""
    import one_process
    import torch.distributed as dist
    import train_gpt_zero as example
    from train_gpt import Options

    options, stages = Options(eval_every=6, check=3, runtime="zero", out=folder), []
    for stage in STAGES:
        config = example.config_of(stage, name)
        recipe = small(example.recipe_of(config))
        stages.append(example.run_config(config, recipe, corpus, options).train)
    if dist.get_rank() != 0:
        return None
    one_process.check(recipe, corpus, options.check, folder, 2)
    single = one_process.losses(recipe, corpus)
    other_order = largest_difference(one_process.losses(recipe, corpus, 2), single)
    return stages, single, max(one_process.TOLERANCE, 2 * other_order)


def small(recipe):
    like = small_recipe()
    return replace(recipe, steps=like.steps, warmup_steps=like.warmup_steps, model=like.model)

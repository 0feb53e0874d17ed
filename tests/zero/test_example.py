"""examples/train_gpt_zero.py with its JSON files, on a smaller model and few steps."""

import json
import sys
from dataclasses import replace

from tests.mesh.test_example_3d import largest_difference, small_recipe
from tests.support.ranks import ROOT, run_fresh

sys.path.append(str(ROOT / "examples"))

SCRIPT = """
import os
os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun does
from tests.zero.test_example import train_{what}
train_{what}({folder!r})
"""


def test_every_stage_and_one_process_have_one_curve(tmp_path):
    run_fresh(SCRIPT.format(what="all_stages", folder=str(tmp_path)), 2)
    told = json.loads((tmp_path / "curves.json").read_text())
    single, tolerance = told.pop("one process"), told.pop("tolerance")
    assert single[-1] < single[0] - 0.5, "the model learns"
    assert sorted(told) == ["0", "1", "2", "3"]
    for stage, curve in told.items():
        assert largest_difference(curve, single) <= tolerance, f"stage {stage}"


def train_all_stages(folder):
    """Writes the training losses of each stage and of one process, and the tolerance of the examples."""
    import one_process
    import torch.distributed as dist
    import train_gpt_zero as example
    from corpus import load_corpus

    example.start_processes()
    corpus, curves = load_corpus(), {}
    for stage in range(4):
        config = example.config_of(stage, "dmuon")
        recipe = small(example.recipe_of(config))
        curves[stage] = example.run_config(config, recipe, corpus, options(folder)).train
    if dist.get_rank() == 0:
        curves["one process"] = whole = one_process.losses(recipe, corpus)
        other_order = largest_difference(one_process.losses(recipe, corpus, 2), whole)
        curves["tolerance"] = max(one_process.TOLERANCE, 2 * other_order)
        with open(f"{folder}/curves.json", "w") as file:
            json.dump(curves, file)
    dist.barrier()  # the others wait here for the first


def test_the_same_json_with_adamw_for_its_optimizer_equals_one_process(tmp_path):
    run_fresh(SCRIPT.format(what="and_check_adamw", folder=str(tmp_path)), 2)


def train_and_check_adamw(folder):
    import one_process
    import torch.distributed as dist
    import train_gpt_zero as example
    from corpus import load_corpus

    example.start_processes()
    corpus = load_corpus()
    for stage in (0, 3):
        config = example.config_of(stage, "adamw")
        recipe = small(example.recipe_of(config))
        run = example.run_config(config, recipe, corpus, options(folder))
        if dist.get_rank() == 0:
            one_process.check(run.recipe, corpus, 3, options(folder).out, 2)
        dist.barrier()


def small(recipe):
    like = small_recipe()
    return replace(recipe, steps=like.steps, warmup_steps=like.warmup_steps, model=like.model)


def options(folder):
    from pathlib import Path

    from train_gpt import Options

    return Options(eval_every=6, check=3, runtime="zero", out=Path(folder))

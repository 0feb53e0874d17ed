"""examples/train_gpt_3d.py, on a smaller model and few steps."""

import sys
from dataclasses import replace

import pytest

from tests.support.ranks import ROOT, run_ranks

sys.path.append(str(ROOT / "examples"))

SIZES = (2, 2, 2)
STEPS = 6


def test_three_axes_train_as_one_axis_does(tmp_path):
    ours, flat, tolerance = run_ranks(train_both, 8, tmp_path, limit_s=120)[0]
    assert len(ours) == len(flat) == STEPS
    assert ours[-1] < ours[0] - 0.5, "the model learns, or there is nothing to compare"
    assert largest_difference(ours, flat) <= tolerance


def train_both(rank, world_size, folder):
    """On rank 0 the training losses on three axes and on one, and the tolerance of the example."""
    import torch.distributed as dist
    import train_gpt_3d as example
    from corpus import load_corpus
    from torch.distributed.device_mesh import init_device_mesh

    recipe, corpus = small_recipe(), load_corpus()
    options = example.Options(eval_every=STEPS, out=folder)
    ours = example.run_3d(recipe, corpus, SIZES, "cpu", options)
    flat = example.run_flat(recipe, corpus, init_device_mesh("cpu", (world_size,)), options)
    tolerance = example.tolerance(recipe, corpus, SIZES) if rank == 0 else None
    dist.barrier()  # the others wait here for the tolerance
    return ours.train, flat.train, tolerance


def small_recipe():
    from gpt import GPTConfig
    from recipe import TUNED

    model = GPTConfig(context=32, layers=2, width=64, heads=4)
    return replace(TUNED["dmuon"], steps=STEPS, warmup_steps=2, model=model)


def largest_difference(ours, theirs):
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


def test_sizes_that_do_not_fit_the_job_are_named():
    run_ranks(check_sizes, 2)


def check_sizes(rank, world_size):
    import train_gpt_3d as example

    with pytest.raises(SystemExit, match="needs 8 processes and there are 2"):
        example.check_sizes(SIZES, small_recipe())
    three_heads = replace(small_recipe(), model=replace(small_recipe().model, heads=3))
    with pytest.raises(SystemExit, match="cannot share 3 attention heads"):
        example.check_sizes((1, 1, 2), three_heads)

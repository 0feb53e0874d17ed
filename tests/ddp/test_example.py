"""examples/train_gpt.py under both runtimes, on a smaller model and few steps."""

import sys
from dataclasses import replace

from tests.mesh.test_example_3d import largest_difference, small_recipe
from tests.support.ranks import ROOT, run_ranks

sys.path.append(str(ROOT / "examples"))

STEPS = 6


def test_ddp_and_fsdp2_and_one_process_have_one_curve(tmp_path):
    curves, tolerance = run_ranks(train_all, 4, tmp_path, limit_s=120)[0]
    assert curves["ddp"][-1] < curves["ddp"][0] - 0.5, "the model learns"
    for other in ("fsdp2", "one process"):
        assert largest_difference(curves["ddp"], curves[other]) <= tolerance, other


def train_all(rank, world_size, folder):
    """On rank 0 the training losses of each, and the tolerance of the examples."""
    import one_process
    import torch.distributed as dist
    import train_gpt
    from corpus import load_corpus
    from torch.distributed.device_mesh import init_device_mesh

    recipe, corpus = small_recipe(), load_corpus()
    mesh, curves, tolerance = init_device_mesh("cpu", (world_size,)), {}, None
    for runtime in ("ddp", "fsdp2"):
        options = train_gpt.Options(eval_every=STEPS, runtime=runtime, out=folder)
        curves[runtime] = train_gpt.run_recipe(recipe, corpus, mesh, options).train
    if rank == 0:
        curves["one process"] = whole = one_process.losses(recipe, corpus)
        other_order = largest_difference(one_process.losses(recipe, corpus, world_size), whole)
        tolerance = max(one_process.TOLERANCE, 2 * other_order)
    dist.barrier()  # the others wait here for the first
    return curves, tolerance


def test_adamw_trains_under_ddp_too(tmp_path):
    run_ranks(check_adamw, 2, tmp_path)


def check_adamw(rank, world_size, folder):
    import torch
    import train_gpt
    from corpus import load_corpus
    from recipe import TUNED
    from torch.distributed.device_mesh import init_device_mesh

    recipe = replace(TUNED["adamw"], steps=2, model=small_recipe().model)
    mesh = init_device_mesh("cpu", (world_size,))
    options = train_gpt.Options(eval_every=2, check=2, runtime="ddp", out=folder)
    run = train_gpt.run_recipe(recipe, load_corpus(), mesh, options)
    assert len(run.train) == 2
    if rank == 0:
        saved = torch.load(folder / "adamw.pt")
        assert set(saved) == {name for name, _ in recipe.initial_model().named_parameters()}

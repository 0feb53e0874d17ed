"""Train the GPT of train_gpt.py on three axes: replicas of sharded, tensor-parallel models.

    torchrun --nproc-per-node 8 examples/train_gpt_3d.py --mesh 2 2 2
    torchrun --nproc-per-node 8 examples/train_gpt_3d.py --mesh 1 4 2 --steps 20 --compare

``--mesh R G T``: R replicas of G shards of T tensor-parallel ranks, R x G x T processes in all; an axis
of size 1 is as good as none, and T must divide the attention heads. The data-parallel ranks are the
R x G; the T ranks of each see the same sequences. ``--compare`` trains on one axis as train_gpt.py does
too, in the same processes, and prints both curves: the losses may differ by twice what adding the
gradients in another order changes in one process.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; read when torch is imported

import math
from dataclasses import replace
from pathlib import Path

import dmuon
import one_process
import torch.distributed as dist
import train_gpt
from corpus import Corpus, load_corpus
from gpt import is_hidden_matrix
from recipe import Recipe
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from train_gpt import Options, Run, Share

AXES = ("replicate", "shard", "tp")
BY_OUTPUTS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc")
BY_INPUTS = ("attn.o_proj", "mlp.proj")

Sizes = tuple[int, int, int]  # of AXES


def main() -> None:
    parser = train_gpt.make_parser(__doc__)
    parser.add_argument("--mesh", type=int, nargs=3, metavar=("R", "G", "T"), default=(2, 2, 2))
    parser.add_argument("--compare", action="store_true", help="with training on one axis")
    arguments = {"optimizer": "dmuon", "out": Path("out/train_3d")}
    arguments |= {key: v for key, v in vars(parser.parse_args()).items() if v is not None}
    sizes, comparing = tuple(arguments.pop("mesh")), arguments.pop("compare")
    recipe, options = train_gpt.settings(arguments)
    corpus = load_corpus()
    flat = train_gpt.start_processes()
    run = run_3d(recipe, corpus, sizes, flat.device_type, options)
    plain = run_flat(recipe, corpus, flat, options) if comparing else None
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    judged = flat.device_type == "cpu"
    if is_first and options.check:
        one_process.check(
            recipe, corpus, options.check, options.out, math.prod(sizes), judged=judged
        )
    if is_first and plain:
        show_difference(run, plain, corpus, sizes, judged=judged)


def run_3d(recipe: Recipe, corpus: Corpus, sizes: Sizes, device: str, options: Options) -> Run:
    check_sizes(sizes, recipe)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=AXES)
    replica, shard, _ = mesh.get_coordinate()
    share = Share(replica * sizes[1] + shard, sizes[0] * sizes[1], device)
    return train_gpt.run_model(recipe, corpus, share, *build(recipe, mesh), options)


def run_flat(recipe: Recipe, corpus: Corpus, mesh: DeviceMesh, options: Options) -> Run:
    return train_gpt.run_recipe(
        recipe, corpus, mesh, replace(options, check=0, out=options.out / "one_axis")
    )


def check_sizes(sizes: Sizes, recipe: Recipe) -> None:
    if math.prod(sizes) != dist.get_world_size():
        raise SystemExit(
            f"--mesh {' '.join(map(str, sizes))} needs {math.prod(sizes)} processes and there are "
            f"{dist.get_world_size()}: give torchrun --nproc-per-node {math.prod(sizes)}."
        )
    if recipe.model.heads % sizes[2]:
        raise SystemExit(
            f"{sizes[2]} tensor-parallel ranks cannot share {recipe.model.heads} attention heads; "
            "the third number of --mesh must divide them."
        )


def build(recipe: Recipe, mesh: DeviceMesh) -> tuple[nn.Module, Optimizer]:
    model = recipe.initial_model().to(mesh.device_type)
    plan = {name: ColwiseParallel() for name in BY_OUTPUTS}
    plan |= {name: RowwiseParallel() for name in BY_INPUTS}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    dmuon.dedicate_params(
        model, mesh["shard"], predicate=is_hidden_matrix, replicate_mesh=mesh["replicate"]
    )
    data = mesh["replicate", "shard"]
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return model, train_gpt.make_muon(recipe, model)


def show_difference(
    run: Run, flat: Run, corpus: Corpus, sizes: Sizes, *, judged: bool = True
) -> None:
    """Prints both curves.

    Raises:
        SystemExit: a training loss differs by more than the tolerance, and is `judged`: on a GPU
            Newton-Schulz iterates in half precision.
    """
    print("validation loss\n  step   three axes     one axis   difference")
    for (step, ours), (_, theirs) in zip(run.validation, flat.validation, strict=True):
        print(f"{step:6} {ours:12.6f} {theirs:12.6f} {abs(ours - theirs):12.1e}")
    difference, bound = largest(run.train, flat.train), tolerance(run.recipe, corpus, sizes)
    print(
        f"training losses of {len(run.train)} steps differ by {difference:.1e} at most (relative); "
        f"tolerance {bound:.1e}"
    )
    if judged and not difference <= bound:
        raise SystemExit("Three axes do not train as one axis does.")


def tolerance(recipe: Recipe, corpus: Corpus, sizes: Sizes) -> float:
    """Twice what adding the gradients in the orders of both runs changes in one process."""
    whole = one_process.losses(recipe, corpus)
    orders = {sizes[0] * sizes[1], math.prod(sizes)} - {1}
    controls = [largest(one_process.losses(recipe, corpus, slices), whole) for slices in orders]
    return max(one_process.TOLERANCE, 2 * max(controls, default=0.0))


def largest(losses: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(got - want) / want for got, want in zip(losses, expected, strict=True))


if __name__ == "__main__":
    main()

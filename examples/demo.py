"""Muon under dmuon against AdamW: the same model, batches and number of steps.

    torchrun --nproc-per-node 4 examples/demo.py [--runtime ddp | --runtime zero --stage 3]

Trains twice, draws both validation curves, and checks dmuon against training in one process.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import one_process
import torch.distributed as dist
import train_gpt
from corpus import Corpus, load_corpus
from recipe import TUNED

OPTIONS = train_gpt.Options(eval_every=5, check=5, out=Path("out/demo"))


def main() -> None:
    runtime, stage = parse_args()
    options = replace(OPTIONS, runtime=runtime)
    corpus = load_corpus()
    train, device = under_zero(stage) if runtime == "zero" else under_torch()
    adamw, muon = (train(name, corpus, options) for name in ("adamw", "dmuon"))
    is_first, world_size = dist.get_rank() == 0, dist.get_world_size()
    dist.destroy_process_group()
    if not is_first:
        return
    print(verdict(adamw, muon))
    draw(adamw, muon, options.out / "curves.png")
    judged = device == "cpu"
    one_process.check(muon.recipe, corpus, options.check, options.out, world_size, judged=judged)


def parse_args() -> tuple[str, int]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    runtimes = [*train_gpt.RUNTIMES, "zero"]
    parser.add_argument("--runtime", choices=runtimes, default=OPTIONS.runtime)
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="of ZeRO")
    given = parser.parse_args()
    return given.runtime, given.stage


def under_torch() -> tuple[Callable, str]:
    """Trains by name of the optimizer; and the device it is done on."""
    mesh = train_gpt.start_processes()

    def train(name: str, corpus: Corpus, options: train_gpt.Options) -> train_gpt.Run:
        return train_gpt.run_recipe(TUNED[name], corpus, mesh, options)

    return train, mesh.device_type


def under_zero(stage: int) -> tuple[Callable, str]:
    import train_gpt_zero  # here, so that the other runtimes need no DeepSpeed

    train_gpt_zero.start_processes()
    return partial(train_gpt_zero.run_stage, stage), train_gpt_zero.device()


def steps_to_reach(run: train_gpt.Run, loss: float) -> int | None:
    """The first validation at or below `loss`, in steps."""
    return next((step for step, value in run.validation if value <= loss), None)


def verdict(adamw: train_gpt.Run, muon: train_gpt.Run) -> str:
    (steps, goal), (_, final) = adamw.validation[-1], muon.validation[-1]
    reached = steps_to_reach(muon, goal)
    if reached is None:
        return f"Muon ended at {final:.3f}, above AdamW's final validation loss ({goal:.3f})"
    return (
        f"Muon reached AdamW's final validation loss ({goal:.3f}) at step {reached} of {steps}, "
        f"and ended at {final:.3f}"
    )


def draw(adamw: train_gpt.Run, muon: train_gpt.Run, path: Path) -> None:
    import matplotlib  # on one rank only: it takes its time to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    label = f"AdamW, lr {adamw.recipe.adamw_lr:g}"
    axes.plot(*zip(*adamw.validation), color="tab:gray", label=label)
    label = f"dmuon: Muon, lr {muon.recipe.lr:g}; AdamW for the rest, lr {muon.recipe.adamw_lr:g}"
    axes.plot(*zip(*muon.validation), color="tab:blue", label=label)
    mark_crossing(axes, adamw, muon)
    best = min(run.validation[-1][1] for run in (adamw, muon))
    axes.set_ylim(best - 0.1, best + 1.2)  # the untrained model would flatten all the rest
    axes.set_xlabel(f"step ({adamw.recipe.batch * adamw.recipe.context:,} bytes each)")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title("Byte-level GPT on the sources of Python's standard library")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    print(f"curves: {path}")


def mark_crossing(axes, adamw: train_gpt.Run, muon: train_gpt.Run) -> None:
    steps, goal = adamw.validation[-1]
    reached = steps_to_reach(muon, goal)
    axes.axhline(goal, color="tab:gray", linestyle=":", linewidth=1)
    if reached is not None:
        axes.plot(reached, dict(muon.validation)[reached], "o", color="tab:red", zorder=3)
        axes.annotate(
            f"AdamW's final loss, {goal:.3f},\nat step {reached} of {steps}",
            (reached, goal),
            xytext=(-150, -44),
            textcoords="offset points",
            color="tab:red",
        )


if __name__ == "__main__":
    main()

"""Train the GPT of train_gpt.py under DeepSpeed ZeRO: its JSON alone decides that dmuon trains it.

torchrun --nproc-per-node 4 examples/train_gpt_zero.py --config examples/zero/stage3.json
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; read when torch is imported

import argparse
import json
from dataclasses import replace
from pathlib import Path

import dmuon
import one_process
import torch.distributed as dist
import train_gpt
from corpus import Corpus, load_corpus
from deepspeed_here import import_deepspeed, torch_adamw
from recipe import TUNED, Recipe
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from train_gpt import Options, Run, Share

CONFIGS = Path(__file__).parent / "zero"


def main() -> None:
    config, steps, options = parse_args()
    corpus = load_corpus()
    start_processes()
    recipe = replace(recipe_of(config), steps=steps)
    run = run_config(config, recipe, corpus, options)
    is_first, world_size = dist.get_rank() == 0, dist.get_world_size()
    dist.destroy_process_group()
    if options.check and is_first:
        judged = device() == "cpu"
        one_process.check(run.recipe, corpus, options.check, options.out, world_size, judged=judged)


def parse_args() -> tuple[dict, int, Options]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIGS / "stage3.json")
    parser.add_argument("--steps", type=int, default=TUNED["dmuon"].steps)
    parser.add_argument("--check", type=int, default=0, metavar="K")
    parser.add_argument("--out", type=Path, default=Path("out/train_zero"))
    given = parser.parse_args()
    config = json.loads(given.config.read_text())
    return config, given.steps, Options(check=given.check, runtime="zero", out=given.out)


def start_processes() -> None:
    """NCCL where there are GPUs, gloo on the CPU elsewhere."""
    import_deepspeed().init_distributed()


class Trainee:
    """An engine of DeepSpeed's, as train_gpt.py trains it."""

    def __init__(self, config: dict, recipe: Recipe):
        import deepspeed

        self._recipe = recipe
        self.model, *_ = deepspeed.initialize(  # with `import dmuon` above, this is all
            model=recipe.initial_model(),
            config=config,
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, recipe.lr_factor),
        )

    def step(self, batch: list[Tensor]) -> float:
        loss = self.model(*batch)
        self.model.backward(loss)
        self.model.step()
        return train_gpt.mean_over_ranks(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            name: (p if (whole := safe_get_full_fp32_param(p)) is None else whole).detach().cpu()
            for name, p in self._named()
        }

    def _named(self):
        if self._recipe.optimizer == "dmuon":
            return dmuon.zero.named_parameters(self.model)
        return self.model.module.named_parameters()


def run_config(config: dict, recipe: Recipe, corpus: Corpus, options: Options) -> Run:
    trainee = Trainee(config, recipe)
    share = Share(dist.get_rank(), dist.get_world_size(), device())
    run = train_gpt.run_trainee(recipe, corpus, share, trainee, options)
    trainee.model.destroy()
    return run


def run_stage(stage: int, optimizer: str, corpus: Corpus, options: Options) -> Run:
    config = config_of(stage, optimizer)
    return run_config(config, recipe_of(config), corpus, options)


def config_of(stage: int, optimizer: str) -> dict:
    """The JSON of a stage; with AdamW, what it was before dmuon."""
    config = json.loads((CONFIGS / f"stage{stage}.json").read_text())
    return with_adamw(config, TUNED["adamw"]) if optimizer == "adamw" else config


def with_adamw(config: dict, recipe: Recipe) -> dict:
    params = {
        "lr": recipe.adamw_lr,
        "betas": recipe.betas,
        "weight_decay": recipe.weight_decay,
        **torch_adamw(),
    }
    rest = {key: value for key, value in config.items() if key != "dmuon"}
    return {**rest, "optimizer": {"type": "AdamW", "params": params}}


def recipe_of(config: dict) -> Recipe:
    """What a JSON trains, for the schedule and the check; one weight decay for Muon and AdamW."""
    params = config["optimizer"]["params"]
    name = config["optimizer"]["type"].lower()
    prefix = "adamw_" if name == "dmuon" else ""
    muon = {"lr": params["lr"], "momentum": params["momentum"]} if name == "dmuon" else {}
    return replace(
        TUNED[name],
        adamw_lr=params[prefix + "lr"],
        betas=tuple(params[prefix + "betas"]),
        weight_decay=params["weight_decay"],
        batch=config["train_batch_size"],
        max_grad_norm=config["gradient_clipping"],
        **muon,
    )


def device() -> str:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().current_device_name()


if __name__ == "__main__":
    main()

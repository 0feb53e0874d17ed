"""Final validation loss of a small GPT by learning rate, with AdamW and with Muon, in one process.

    python examples/learning_rates.py [--steps 150] [--layers 2 --width 128]

The matrices inside the blocks have the rate that is tried; everything else has AdamW at --adamw-lr, the same in
every run of Muon. With AdamW alone one rate is everybody's. No weight decay; Muon's rule is match_rms_adamw.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace

import torch
from corpus import Corpus, load_corpus
from gpt import GPTConfig
from one_process import train
from recipe import TUNED, Recipe

RATES = {
    "adamw": (0.0005, 0.001, 0.002, 0.004, 0.008),
    "dmuon": (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08),
}
VALIDATION_WINDOWS = 128


def main() -> None:
    given = parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus()
    model = GPTConfig(context=64, layers=given.layers, width=given.width)
    for optimizer, rates in RATES.items():
        for rate, loss in sweep(optimizer, rates, corpus, model, given):
            print(f"{optimizer:6} lr {rate:<8g} validation loss {loss:.3f}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--adamw-lr", type=float, default=0.004)
    return parser.parse_args()


def sweep(
    optimizer: str,
    rates: Iterable[float],
    corpus: Corpus,
    model: GPTConfig,
    given: argparse.Namespace,
) -> Iterable[tuple[float, float]]:
    for rate in rates:
        recipe = replace(TUNED[optimizer], model=model, steps=given.steps, weight_decay=0.0)
        if optimizer == "adamw":
            recipe = replace(recipe, adamw_lr=rate)
        else:
            recipe = replace(recipe, lr=rate, adamw_lr=given.adamw_lr)
        yield rate, final_loss(recipe, corpus)


@torch.no_grad()
def loss_of(model: torch.nn.Module, recipe: Recipe, corpus: Corpus) -> float:
    return model(*corpus.validation_batch(VALIDATION_WINDOWS, recipe.context)).item()


def final_loss(recipe: Recipe, corpus: Corpus) -> float:
    return loss_of(train(recipe, corpus, recipe.steps), recipe, corpus)


if __name__ == "__main__":
    main()

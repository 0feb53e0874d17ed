"""torchtitan's llama3 debug model with dmuon, and with AdamW; the losses side by side.

    torchrun --nproc-per-node 2 examples/torchtitan/train.py

On a GPU as well as without. Options: --steps, --layers, --lr, --adamw-lr.
"""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import here
import torch.distributed as dist
from dmuon.integrations.torchtitan import DMuon, dedicate
from torchtitan.components.optimizer import default_adamw


def is_matrix(name, p):
    return p.ndim == 2 and "layers." in name


def losses(config) -> list[float]:
    trainer, seen = here.build(config), []
    log = trainer.metrics_processor.log

    def listen(step, loss, *args, **kwargs):
        seen.append(loss)
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = listen
    trainer.train()
    trainer.close()
    return seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--adamw-lr", type=float, default=3e-3)
    options = parser.parse_args()
    logging.disable(logging.INFO)

    def config(optimizer):
        return here.llama3(
            layers=options.layers, training={"steps": options.steps}, optimizer=optimizer
        )

    muon = config(DMuon(lr=options.lr, adamw_lr=options.adamw_lr, implementation="for-loop"))
    muon.model_spec = dedicate(muon.model_spec, predicate=is_matrix)
    adamw = config(default_adamw(lr=options.adamw_lr))
    adamw.optimizer.implementation = "for-loop"
    with_muon, with_adamw = losses(muon), losses(adamw)
    if dist.get_rank() == 0:
        print(f"{'step':>5}{'dmuon':>9}{'AdamW':>9}")
        for step, pair in enumerate(zip(with_muon, with_adamw, strict=True), 1):
            print(f"{step:>5}{pair[0]:>9.3f}{pair[1]:>9.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

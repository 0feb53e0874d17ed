"""Train a small GPT with FSDP2 or DDP: with dmuon, or with AdamW alone.

torchrun --nproc-per-node 4 examples/train_gpt.py --optimizer dmuon --runtime ddp
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; read when torch is imported

import argparse
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import dmuon
import one_process
import torch
import torch.distributed as dist
from corpus import Corpus, load_corpus
from gpt import is_hidden_matrix
from recipe import TUNED, Recipe
from tables import as_tables
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

VALIDATION_WINDOWS = 64


@dataclass(frozen=True)
class Options:
    """What changes nothing about the training itself."""

    eval_every: int = 10
    check: int = 0  # save the weights after this many steps; 0: never
    runtime: str = "fsdp2"  # or "ddp": whole weights on every rank
    out: Path = Path("out/train")


@dataclass
class Run:
    """What a training run leaves behind. Losses are in nats per byte, the mean over all ranks."""

    recipe: Recipe
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    train: list[float] = field(default_factory=list)  # of each global batch, before its step
    train_seconds: float = 0.0  # without validation

    @property
    def tokens_per_s(self) -> float:
        tokens = len(self.train) * self.recipe.batch * self.recipe.context
        return tokens / max(self.train_seconds, 1e-9)


@dataclass(frozen=True)
class Share:
    """Which part of each batch this process trains on."""

    index: int
    count: int
    device: str

    def rows(self, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Of a global batch, on this process' device."""
        if len(batch[0]) % self.count:
            raise ValueError(
                f"{len(batch[0])} sequences do not divide over {self.count} data-parallel ranks; "
                "choose a multiple (--batch for training)"
            )
        return [part.chunk(self.count)[self.index].to(self.device) for part in batch]


def main() -> None:
    recipe, options = parse_args()
    corpus = load_corpus()
    mesh = start_processes()
    run_recipe(recipe, corpus, mesh, options)
    is_first, world_size = dist.get_rank() == 0, dist.get_world_size()
    dist.destroy_process_group()
    if options.check and is_first:
        judged = mesh.device_type == "cpu"
        one_process.check(recipe, corpus, options.check, options.out, world_size, judged=judged)


def parse_args() -> tuple[Recipe, Options]:
    parser = make_parser(__doc__)
    parser.add_argument("--optimizer", choices=list(TUNED), default="dmuon")
    add_runtime(parser)
    return settings(vars(parser.parse_args()))


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--lr", type=float, help="of the matrices inside the blocks (dmuon only)")
    parser.add_argument("--adamw-lr", type=float, help="of everything that AdamW trains")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="sequences in a global batch")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--eval-every", type=int, metavar="STEPS")
    parser.add_argument(
        "--check", type=int, metavar="K", help="compare the first K steps with one process"
    )
    parser.add_argument("--out", type=Path, help="folder for the results")
    return parser


def add_runtime(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", choices=list(RUNTIMES), help="fsdp2 where it is not given")


def settings(arguments: dict) -> tuple[Recipe, Options]:
    given = {key: value for key, value in arguments.items() if value is not None}
    options = {
        key: given.pop(key) for key in ("eval_every", "check", "runtime", "out") if key in given
    }
    return replace(TUNED[given["optimizer"]], **given), Options(**options)


def start_processes() -> DeviceMesh:
    """NCCL where each process has a GPU of its own, gloo on the CPU elsewhere."""
    local_rank, local_world = (int(os.environ[key]) for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    use_gpu = torch.cuda.device_count() >= local_world
    if use_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    device = "cuda" if use_gpu else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))


def run_recipe(recipe: Recipe, corpus: Corpus, mesh: DeviceMesh, options: Options) -> Run:
    model, optimizer = build(recipe, mesh, options.runtime)
    share = Share(mesh.get_local_rank(), mesh.size(), mesh.device_type)
    return run_model(recipe, corpus, share, model, optimizer, options)


def run_model(
    recipe: Recipe,
    corpus: Corpus,
    share: Share,
    model: nn.Module,
    optimizer: Optimizer,
    options: Options,
) -> Run:
    return run_trainee(recipe, corpus, share, Trainee(recipe, model, optimizer), options)


def run_trainee(recipe: Recipe, corpus: Corpus, share: Share, trainee, options: Options) -> Run:
    """``trainee``: a `Trainee`, or what has its members."""
    run = train(recipe, corpus, share, trainee, options)
    show(run, trainee.model, share)
    if dist.get_rank() == 0:
        save(run, options.out)
    return run


def build(recipe: Recipe, mesh: DeviceMesh, runtime: str) -> tuple[nn.Module, Optimizer]:
    model = recipe.initial_model().to(mesh.device_type)
    model = RUNTIMES[runtime](model, mesh, dedicated=recipe.optimizer == "dmuon")
    if recipe.optimizer == "dmuon":
        return model, make_muon(recipe, model)
    return model, AdamW(
        model.parameters(), recipe.adamw_lr, recipe.betas, weight_decay=recipe.weight_decay
    )


def under_fsdp2(model: nn.Module, mesh: DeviceMesh, dedicated: bool) -> nn.Module:
    if dedicated:
        dmuon.dedicate_params(model, mesh, predicate=is_hidden_matrix)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def under_ddp(model: nn.Module, mesh: DeviceMesh, dedicated: bool) -> nn.Module:
    if not dedicated:
        return DistributedDataParallel(model, process_group=mesh.get_group())
    dmuon.dedicate_params_ddp(model, mesh, predicate=is_hidden_matrix)
    return dmuon.replicate(model, mesh)  # or DistributedDataParallel(model), as above


RUNTIMES = {"fsdp2": under_fsdp2, "ddp": under_ddp}


def make_muon(recipe: Recipe, model: nn.Module) -> dmuon.Muon:
    """Newton-Schulz in its direct form, as exact in float32 as plain PyTorch, to be compared with one process. The
    default, ``"gram"``, is up to three times as fast, and errs up to 3e-3 (docs/newton_schulz.md)."""
    return dmuon.Muon(
        model,
        ns_backend="direct",
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        adamw_lr=recipe.adamw_lr,
        adamw_betas=recipe.betas,
        adamw_weight_decay=recipe.weight_decay,
    )


class Trainee:
    """A model with its optimizer and schedule, as one thing to train."""

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer):
        self.model = model
        self._recipe, self._optimizer = recipe, optimizer
        self._scheduler = LambdaLR(optimizer, recipe.lr_factor)

    def step(self, batch: list[Tensor]) -> float:
        """The loss before the step, the mean over all ranks."""
        self._optimizer.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        self._clip()
        self._optimizer.step()
        self._scheduler.step()
        return mean_over_ranks(loss.detach())

    def _clip(self) -> None:
        if self._recipe.optimizer == "dmuon":
            dmuon.clip_grad_norm_(self._optimizer, self._recipe.max_grad_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.max_grad_norm)

    def weights(self) -> dict[str, Tensor]:
        """Whole, by name, on the first rank. Every rank calls."""
        if self._recipe.optimizer == "dmuon":
            return dmuon.get_model_state_dict(self.model)
        named = getattr(self.model, "module", self.model).named_parameters()
        return {name: whole(p).detach().cpu() for name, p in named}


def train(recipe: Recipe, corpus: Corpus, share: Share, trainee, options: Options) -> Run:
    run = Run(recipe)
    bar = tqdm(range(recipe.steps), recipe.optimizer, disable=dist.get_rank() != 0, unit="step")
    for step in bar:
        if step % options.eval_every == 0:
            run.validation.append((step, validate(trainee.model, corpus, recipe, share)))
        batch = share.rows(corpus.batch(recipe.seed, step, recipe.batch, recipe.context))
        began = time.perf_counter()
        run.train.append(trainee.step(batch))
        run.train_seconds += time.perf_counter() - began
        if step + 1 == options.check:
            save_weights(trainee.weights(), recipe, options.out)
        loss = run.validation[-1][1]
        bar.set_postfix_str(f"validation {loss:.3f}, {run.tokens_per_s:,.0f} tokens/s")
    run.validation.append((recipe.steps, validate(trainee.model, corpus, recipe, share)))
    return run


@torch.no_grad()
def validate(model: nn.Module, corpus: Corpus, recipe: Recipe, share: Share) -> float:
    windows = corpus.validation_batch(VALIDATION_WINDOWS, recipe.context)
    return mean_over_ranks(model(*share.rows(windows)))


def mean_over_ranks(value: Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save_weights(weights: dict[str, Tensor], recipe: Recipe, folder: Path) -> None:
    """For the check, by the first rank."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, one_process.weights_file(folder, recipe))


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def show(run: Run, model: nn.Module, share: Share) -> None:
    """Every rank calls; the first one prints."""
    lines = [
        f"{run.recipe.optimizer}: validation loss {run.validation[-1][1]:.3f} after "
        f"{run.recipe.steps} steps, {run.tokens_per_s:,.0f} tokens/s"
    ]
    if run.recipe.optimizer == "dmuon":
        report = dmuon.report(model)
        calls = torch.tensor(report["ns_calls_last_step"], device=share.device)
        dist.all_reduce(calls)
        matrices = len(dmuon.get_dedicated_params(model))
        lines += [f"Newton-Schulz calls in the last step: {calls.item()} for {matrices} matrices"]
        lines += ["", "dmuon.report() of rank 0", as_tables(report)]
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def save(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(run) | {"tokens_per_s": run.tokens_per_s}, indent=1)
    (folder / f"{run.recipe.optimizer}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

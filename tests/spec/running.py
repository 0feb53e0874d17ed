"""Runs a file of examples/spec/ on several ranks, and the same training in one process."""

import contextlib
import io
import os
import pickle
import runpy
import sys
from dataclasses import dataclass

import torch

from tests.support.oracle import Oracle, assert_weights_close
from tests.support.ranks import ROOT, run_as_torchrun

EXAMPLES = ROOT / "examples" / "spec"
sys.path.append(str(EXAMPLES))
KEPT = ("losses", "weights", "losses_again", "weights_again", "model_sd", "dataloader")


@dataclass
class Ran:
    """What one rank printed, and those of the script's variables that say what came out."""

    printed: str
    losses: list
    values: dict


def run_example(name, ranks, folder, *arguments, limit_s=60.0):
    """In `folder`, as torchrun does; one `Ran` for each rank."""
    task = (str(EXAMPLES / f"{name}.py"), str(folder), arguments)
    return [
        Ran(*pickle.loads(told)) for told in run_as_torchrun(_run, ranks, *task, limit_s=limit_s)
    ]


def _run(rank, world_size, path, folder, arguments):
    os.chdir(folder)
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        script = runpy.run_path(path, run_name="__main__")
    assert not torch.distributed.is_initialized(), "the process group was left behind"
    values = {name: script[name] for name in KEPT if name in script}
    losses = values.get("losses", [])
    if "dataloader" in values:
        losses = losses + values.pop("dataloader").losses
    return pickle.dumps((printed.getvalue(), losses, values))


def plainly(model, tokens):
    return model(tokens).loss


class OneProcess:
    """Whole batches in plain PyTorch: `weights` and `losses` after training."""

    def __init__(self, model, chosen, **options):
        self.model, self.losses = model, []
        muon = {name for name, p in model.named_parameters() if chosen(name, p)}
        self.optimizer = Oracle(model, muon, **options)

    def train(self, steps, loss_of=plainly):
        from setting import batches

        for batch in batches(0, 1, steps):
            loss = loss_of(self.model, batch)
            self.losses.append(loss.item())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def one_process(dtype, **options):
    from setting import MyModel, predicate

    return OneProcess(MyModel().to(dtype), predicate, **options)


def references(**options):
    """float64 is the truth; float32, in the form of Newton-Schulz that dmuon has, what plain torch loses."""
    return one_process(torch.float64, **options), one_process(
        torch.float32, ns_backend="gram", **options
    )


def compare(losses, weights, exact, plain, steps):
    """Losses to what float32 sums lose, or twice what plain torch does."""
    assert_weights_close(weights, exact.weights, plain.weights, steps)
    assert_losses_close(losses, exact, plain)


def assert_losses_close(losses, exact, plain):
    for got, want, float32 in zip(losses, exact.losses, plain.losses, strict=True):
        allowed = max(1e-5 * want, 2 * abs(float32 - want))
        assert abs(got - want) <= allowed, f"loss {got}, {want}; allowed {allowed:.1e}"

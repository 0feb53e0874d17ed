"""torchtitan's Trainer on the CPU, and the same training in one process."""

import importlib
import os
import sys

import dmuon
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support import ranks
from tests.support.oracle import Oracle, assert_weights_close
from tests.support.weights import full_weights, total

EXAMPLES = ranks.ROOT / "examples" / "torchtitan"
STEPS, ROWS, LENGTH, CLIP = 4, 8, 64, 0.3
LR, ADAMW_LR = 0.02, 3e-3
# Of the learning rate in each step: two of warm-up, then half of the steps decay, as torchtitan counts them.
SCHEDULE = (0.5, 1, 1, 0.5)


def run_titan(fn, world_size, *args, limit_s=90.0):
    """As `run_ranks`, in ranks of their own: torchtitan needs stubs in torch that no other test should see."""
    key = ("titan", world_size)
    if key not in ranks._pools:
        ranks._pools[key] = ranks.Pool(world_size)
    try:
        return ranks._pools[key].call((fn.__module__, fn.__qualname__, args), limit_s)
    except BaseException:
        ranks.retire(key)
        raise


def titan():
    """`examples/torchtitan/here.py`, which holds the stubs; of a rank that `run_titan` has made."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("here")


def in_layers(name, p):
    return p.ndim == 2 and "layers." in name


def attentive(weight):
    """Attention that is not uniform: gradients of full rank, of which Newton-Schulz keeps the digits."""
    torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)


def config(folder="", *, predicate=in_layers, muon=None, layers=2, **changes):
    """Of a Trainer with dmuon. `predicate` None leaves `dedicate` out."""
    here = titan()
    from dmuon.integrations.torchtitan import DMuon, dedicate
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.models.common.linear import Linear

    training = {
        "local_batch_size": ROWS,
        "seq_len": LENGTH,
        "steps": STEPS,
        "max_norm": CLIP,
    } | changes.pop("training", {})
    options = {
        "dataloader": here.Sequences.Config(unlabelled=5),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.5),
        "optimizer": DMuon(
            lr=LR, adamw_lr=ADAMW_LR, ns_backend="direct", implementation="for-loop", **(muon or {})
        ),
        "dump_folder": str(folder),
    }
    made = here.llama3(layers=layers, training=training, **{**options, **changes})
    for _, linear, _, _ in made.model_spec.model.traverse(Linear.Config):
        linear.param_init = {"weight": attentive}
    if predicate is not None:
        made.model_spec = dedicate(made.model_spec, predicate=predicate)
    return made


class Trained:
    """What a Trainer has logged, step by step, and its weights before and after."""

    def __init__(self, made):
        self.trainer = titan().build(made)
        self.model, self.logged = self.trainer.model_parts[0], []
        self.trainer.metrics_processor.log = self._log
        self.start = full_weights(self.model)

    def _log(self, step, loss, max_loss, norm, extra_metrics):
        self.logged.append({"step": step, "loss": loss, "norm": norm} | extra_metrics)

    def train(self):
        import torchtitan.trainer

        torchtitan.trainer.time.sleep = lambda seconds: None  # for a log, at the end
        self.trainer.train()
        self.trainer.close()
        self.end = full_weights(self.model)
        return self

    @property
    def ns_calls(self):
        return total(dmuon.report(self.model)["ns_calls"])

    def column(self, key):
        return [entry[key] for entry in self.logged]


class OneProcess:
    """The same model and steps in plain PyTorch: losses, norms, weights."""

    def __init__(self, trained, dtype, *, ranks, chosen=in_layers, accumulate=1, **options):
        here = titan()
        made = trained.trainer.config
        self.model = made.model_spec.model.build()
        self.model.init_weights(buffer_device=torch.device("cpu"))
        self.model._apply(
            lambda t: t.to(dtype) if t.is_floating_point() else t
        )  # not what is complex
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(trained.start[name])
        muon = {name for name, p in self.model.named_parameters() if chosen(name, p)}
        self.optimizer = Oracle(self.model, muon, lr=LR, adamw_lr=ADAMW_LR, **options)
        self.data = here.Sequences(
            made.dataloader,
            dp_rank=0,
            dp_world_size=ranks,
            seq_len=made.training.seq_len,
            local_batch_size=made.training.local_batch_size,
        )
        self.batches, self.losses, self.norms = ranks * accumulate, [], []
        bases = [group["lr"] for group in self.optimizer.param_groups]
        for step, factor in enumerate(SCHEDULE):
            for group, base in zip(self.optimizer.param_groups, bases):
                group["lr"] = base * factor
            self._step(step)

    def _step(self, step):
        batches = [self.data.batch(step * self.batches + i) for i in range(self.batches)]
        labels = torch.cat([labels for _, labels in batches]).flatten()
        loss = 0.0
        for given, wanted in batches:  # as the ranks: the sum of each, over the tokens of all
            logits = self.model(given["input"]).flatten(0, 1)
            summed = F.cross_entropy(logits, wanted.flatten(), reduction="sum")
            (summed / (labels != -100).sum()).backward()
            loss += summed.item() / int((labels != -100).sum())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)
        self.norms.append(norm.item())

    @property
    def weights(self):
        return {name: p.detach() for name, p in self.model.named_parameters()}


def assert_as_one_process(trained, **options):
    """Losses, norms, weights, learning rates, and one Newton-Schulz for each matrix and step in the job."""
    calls, matrices = trained.ns_calls, len(dmuon.get_dedicated_params(trained.model))
    assert calls == matrices * STEPS, f"{calls} NS calls in the job"
    assert trained.column("lr/Muon/0") == pytest.approx([LR * f for f in SCHEDULE])
    assert trained.column("lr/Muon/1") == pytest.approx([ADAMW_LR * f for f in SCHEDULE])
    if dist.get_rank() != 0:
        return
    exact = OneProcess(trained, torch.float64, **options)
    plain = OneProcess(trained, torch.float32, **options)
    assert min(exact.norms) > CLIP, f"nothing is clipped: {exact.norms}"
    assert_near(trained.column("loss"), exact.losses, plain.losses)
    assert_near(trained.column("norm"), exact.norms, plain.norms)
    assert_weights_close(trained.end, exact.weights, plain.weights, STEPS)


def assert_near(got, exact, plain):
    """Within twice what plain float32 torch loses, or a few of its roundings."""
    for step, (mine, want, other) in enumerate(zip(got, exact, plain, strict=True)):
        allowed = max(2 * abs(other - want), 1e-5 * abs(want))
        assert abs(mine - want) <= allowed, (
            f"step {step}: {mine}, wanted {want}, allowed {allowed:.1e}"
        )

"""DeepSpeed ZeRO as its users write it, on CPU and gloo, and the same training in one process."""

import copy
import logging
import os

import dmuon
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.models import Net
from tests.support.oracle import Oracle, assert_weights_close
from tests.support.parity import regression
from tests.support.weights import total

STAGES = (0, 1, 2, 3)
# For scripts that run in interpreters of their own.
SETUP = "from tests.support.zero import deepspeed_ready; deepspeed = deepspeed_ready()"


def deepspeed_ready():
    """DeepSpeed, imported and told what it cannot find out on a machine without accelerators."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its own Muon would be compiled
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Compiled at once otherwise, for inference that nobody does here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _forget_groups_of_earlier_tests(deepspeed)
    deepspeed.init_distributed("gloo", dist_init_required=not dist.is_initialized())
    return deepspeed


def _forget_groups_of_earlier_tests(deepspeed):
    """The pool of ranks destroys what a test has made, and DeepSpeed keeps its copy of the world."""
    groups = deepspeed.utils.groups
    if groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        groups._release_process_group_references()


def ds_config(stage, *, gas=1, clip=0.0, params=None, dmuon=None, zero=None, **changes):
    """What a user writes into ds_config.json; `zero` goes into the section of that name."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            **(zero or {}),
        },
        "optimizer": {"type": "DMuon", "params": params or {}},
        "dmuon": dmuon or {"include": ["blocks.*"]},
        **changes,
    }


def make_engine(config, make_model=Net, seed=7, **keywords):
    """What `deepspeed.initialize` returns first."""
    deepspeed = deepspeed_ready()
    torch.manual_seed(seed)
    model = make_model() if isinstance(make_model, type) or callable(make_model) else make_model
    return deepspeed.initialize(model=model, config=config, **keywords)[0]


def batch(step, rank, world_size, part=0, parts=1):
    """Input and target of one rank, one micro-batch of it."""
    g = torch.Generator().manual_seed(step)
    return tuple(t.chunk(world_size)[rank][part::parts] for t in regression(g))


def dtype_of(engine):
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float32


def loss_of(engine, step, part=0, parts=1):
    x, y = batch(step, dist.get_rank(), dist.get_world_size(), part, parts)
    return F.mse_loss(engine(x.to(dtype_of(engine))).float(), y)


def train(engine, steps, first=0):
    """The loop of every DeepSpeed script."""
    parts = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        for part in range(parts):
            engine.backward(loss_of(engine, step, part, parts))
            engine.step()


def weights(engine):
    """Every weight in float32 by name, whole, on every rank."""
    names = [name for name, _ in dmuon.zero.named_parameters(engine)]
    return {name: dmuon.zero.full_fp32_param(engine, name) for name in names}


def chosen_by(engine):
    return {p.param_name for p in dmuon.get_dedicated_params(engine)}


class OneProcess:
    """The same training: gradients are means over the ranks and micro-batches, clipped by their one
    norm, then Muon and AdamW. `compute` is the dtype of forward and backward; gradients and weights are the
    model's."""

    def __init__(
        self, model, muon, world_size, gas=1, clip=0.0, compute=None, lr_at=None, **options
    ):
        self.model, self.muon, self.compute = model, muon, compute
        self.optimizer = Oracle(model, muon, **options)
        self.ranks, self.gas, self.clip = range(world_size), gas, clip
        self.lr_at, self.base = lr_at, [float(g["lr"]) for g in self.optimizer.param_groups]
        self.norm = None

    def start_as_deepspeed(self):
        """Whose float32 copies of what it trains in 16 bits are made of the rounded weights."""
        for name, p in self.model.named_parameters():
            if name not in self.muon:
                p.data = p.data.to(self.compute or p.dtype).to(p.dtype)

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            self.model.zero_grad()
            for rank in self.ranks:
                for part in range(self.gas):
                    self.add_gradients(step, rank, part)
            self.update(step)

    def add_gradients(self, step, rank, part):
        x, y = batch(step, rank, len(self.ranks), part, self.gas)
        model, dtype = self.model, next(self.model.parameters()).dtype
        if self.compute is not None:
            model = copy.deepcopy(model).to(self.compute)
        loss = F.mse_loss(model(x.to(self.compute or dtype)).to(dtype), y.to(dtype))
        loss = loss / (len(self.ranks) * self.gas)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for p, g in zip(self.model.parameters(), gradients, strict=True):
            p.grad = g.to(p.dtype) if p.grad is None else p.grad + g.to(p.dtype)

    def update(self, step):
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.lr_at is not None:
            for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = base * self.lr_at(step)
        self.optimizer.step()

    def weights(self):
        return {name: p.detach() for name, p in self.model.named_parameters()}


def check_zero(
    rank, world_size, stage, *, steps=3, make_model=Net, oracle=None, run=train, **config
):
    """Trains under ZeRO and holds the weights, the norm and the number of Newton-Schulz against one process:
    float64 is the truth, and plain PyTorch in the dtype that computes says what may be lost."""
    torch.manual_seed(7)
    plain = make_model()
    engine = make_engine(ds_config(stage, **config), make_model)
    run(engine, steps)
    got, calls = weights(engine), total(dmuon.report(engine)["ns_calls"])
    if rank == 0:
        options = {"gas": config.get("gas", 1), "clip": config.get("clip", 0.0)}
        options |= {**(config.get("params") or {}), **(oracle or {})}
        chosen, ranks = chosen_by(engine), world_size
        exact = OneProcess(copy.deepcopy(plain).double(), chosen, ranks, **options)
        options["ns_backend"] = "gram"
        compute = None if dtype_of(engine) == torch.float32 else dtype_of(engine)
        single = OneProcess(copy.deepcopy(plain), chosen, ranks, compute=compute, **options)
        single.start_as_deepspeed()
        for reference in (exact, single):
            reference.train(steps)
        assert_weights_close(got, exact.weights(), single.weights(), steps)
        assert calls == exact.optimizer.ns_calls, f"{calls} NS calls in the job"
        check_norm(engine, exact, single)
    return engine


def check_norm(engine, exact, single):
    """What DeepSpeed reports is the norm of all gradients."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return
    allowed = max(1e-5 * exact.norm, 2 * abs(single.norm - exact.norm))
    assert abs(float(norm) - exact.norm) <= allowed, f"norm {float(norm)}, {exact.norm}"

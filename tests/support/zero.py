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
    model = make_model if isinstance(make_model, torch.nn.Module) else make_model()
    return deepspeed.initialize(model=model, config=config, **keywords)[0]


def batch(step, rank, world_size, part=0, parts=1):
    """Input and target of one rank, one micro-batch of it."""
    g = torch.Generator().manual_seed(step)
    return tuple(t.chunk(world_size)[rank][part::parts] for t in regression(g))


def dtype_of(engine):
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float32


def plainly(model, x, step, rank):
    """How a model is called, where a test does not say."""
    return model(x)


def loss_of(engine, step, part=0, parts=1, forward=plainly):
    x, y = batch(step, dist.get_rank(), dist.get_world_size(), part, parts)
    out = forward(engine, x.to(dtype_of(engine)), step, dist.get_rank())
    return F.mse_loss(out.float(), y)


def train(engine, steps, first=0, forward=plainly):
    """The loop of every DeepSpeed script."""
    parts = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        for part in range(parts):
            engine.backward(loss_of(engine, step, part, parts, forward))
            engine.step()


def weights(engine):
    """Every weight in float32 by name, whole, on every rank."""
    names = [name for name, _ in dmuon.zero.named_parameters(engine)]
    return {name: dmuon.zero.full_fp32_param(engine, name) for name in names}


def chosen_by(engine):
    """Names of what Muon trains."""
    return {p.param_name for p in dmuon.get_dedicated_params(engine) if p.route == "muon"}


class OneProcess:
    """The same training: gradients are means over the ranks and micro-batches, clipped by their one
    norm, then Muon and AdamW.

    Args:
        compute: dtype of forward and backward; the weights' is the model's.
        kept: dtype in which gradients are added up.
        second: parameters whose settings are others: (names, of Muon, of AdamW).
        factor: of the gradients, where they are not means.
        settings_at: step -> settings of the groups by name; "lr" is relative to the first.
        managed_at: step -> factor of the gradients that DeepSpeed has, after clipping.
        forward: as in `loss_of`.
    """

    def __init__(
        self,
        model,
        muon,
        world_size,
        *,
        gas=1,
        clip=0.0,
        compute=None,
        kept=None,
        factor=1.0,
        settings_at=None,
        managed_at=None,
        second=None,
        forward=plainly,
        **options,
    ):
        self.model, self.muon, self.compute, self.kept = model, muon, compute, kept or compute
        self.optimizer = Oracle(model, muon, **options)
        self.ranks, self.gas, self.clip, self.factor = range(world_size), gas, clip, factor
        self.settings_at, self.managed_at = settings_at, managed_at
        if second is not None:
            self.divide(*second)
        self.base = [float(g["lr"]) for g in self.optimizer.param_groups]
        self.forward, self.norm = forward, None

    def divide(self, names, muon, adamw):
        others = {id(p) for n, p in self.model.named_parameters() if n in names}
        for group in list(self.optimizer.param_groups):
            both = group["params"]
            group["params"] = [p for p in both if id(p) not in others]
            changed = muon if group["kind"] == "muon" else adamw
            theirs = {**group, **changed, "params": [p for p in both if id(p) in others]}
            self.optimizer.param_groups.append(theirs)

    @property
    def trained(self):
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def start_as_deepspeed(self, whole=()):
        """Whose float32 copies of what it trains in 16 bits are made of the rounded weights."""
        for name, p in self.model.named_parameters():
            if name not in self.muon and name not in whole:
                p.data = p.data.to(self.compute or p.dtype).to(p.dtype)

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            self.add_step(step)
            self.update(step)

    def add_step(self, step):
        self.model.zero_grad()
        for rank in self.ranks:
            for part in range(self.gas):
                self.add_gradients(step, rank, part)
        for name, p in self.trained.items():
            if p.grad is None and name not in self.muon:
                p.grad = torch.zeros_like(p)  # as DeepSpeed has what nobody used

    def add_gradients(self, step, rank, part):
        x, y = batch(step, rank, len(self.ranks), part, self.gas)
        model, dtype = self.model, next(self.model.parameters()).dtype
        if self.compute is not None:
            model = copy.deepcopy(model).to(self.compute)
        out = self.forward(model, x.to(self.compute or dtype), step, rank)
        loss = self.factor * F.mse_loss(out.to(dtype), y.to(dtype))
        loss = loss / (len(self.ranks) * self.gas)
        computing = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, computing, allow_unused=True)
        for p, g in zip(self.trained.values(), gradients, strict=True):
            if g is not None:
                so_far = g.to(p.dtype) if p.grad is None else p.grad + g.to(p.dtype)
                p.grad = so_far.to(self.kept or p.dtype).to(p.dtype)

    def update(self, step):
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norm = torch.nn.utils.get_total_norm(gradients).item()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for name, p in self.trained.items():
            if self.managed_at is not None and name not in self.muon:
                p.grad.mul_(self.managed_at(step))
        if self.settings_at is not None:
            self.set_groups(dict(self.settings_at(step)))
        self.optimizer.step()

    def set_groups(self, settings):
        lr = settings.pop("lr", 1.0)
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * lr
            group.update({key: value for key, value in settings.items() if key in group})

    def weights(self):
        return {name: p.detach() for name, p in self.model.named_parameters()}


def check_zero(
    rank,
    world_size,
    stage,
    *,
    steps=3,
    make_model=Net,
    make=make_engine,
    oracle=None,
    run=train,
    forward=plainly,
    **config,
):
    """Trains under ZeRO and holds the weights, the norm and the number of Newton-Schulz against one process:
    float64 is the truth, and plain PyTorch in the dtype that computes says what may be lost.

    `make(config, model)` makes the engine; `oracle` has keywords of `OneProcess`.
    """
    torch.manual_seed(7)
    plain, config = make_model(), ds_config(stage, **config)
    engine = make(config, copy.deepcopy(plain))
    run(engine, steps, forward=forward)
    if rank == 0:
        exact, single = references(engine, plain, world_size, forward=forward, **(oracle or {}))
        for reference in (exact, single):
            reference.train(steps)
    got, calls = weights(engine), total(dmuon.report(engine)["ns_calls"])
    if rank == 0:
        assert_weights_close(got, exact.weights(), single.weights(), steps)
        assert calls == exact.optimizer.ns_calls, f"{calls} NS calls in the job"
        check_norm(engine, exact, single)
    return engine


def references(engine, plain, world_size, **options):
    """The training of this engine in one process, in float64 and in the dtype that computes."""
    config, dtype = engine.dmuon.plan.config, dtype_of(engine)
    known = {"gas": engine.gradient_accumulation_steps(), "clip": engine.gradient_clipping()}
    muon = config.optimizer_params()
    muon.pop("nonfinite", None)
    options = {**known, **muon, **options}
    chosen = chosen_by(engine)
    exact = OneProcess(copy.deepcopy(plain).double(), chosen, world_size, **options)
    compute = None if dtype == torch.float32 else dtype
    options |= {"ns_backend": "gram", "compute": compute, "kept": config.reduce_dtype}
    single = OneProcess(plain, chosen, world_size, **options)
    single.start_as_deepspeed(engine.dmuon.plan)
    return exact, single


def check_norm(engine, exact, single):
    """What DeepSpeed reports is the norm of all gradients, each rounded to what computes."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return
    dtypes = (dtype_of(engine), engine.dmuon.plan.config.reduce_dtype or torch.float32)
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
    allowed = max(1e-5 * exact.norm, rounding * exact.norm, 2 * abs(single.norm - exact.norm))
    assert abs(float(norm) - exact.norm) <= allowed, f"norm {float(norm)}, {exact.norm}"

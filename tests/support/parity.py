"""Holds a script run by dmuon on several ranks against the same script on one process.

A script is a function of a `Run`. It loops over `run.ranks`, which is this rank's data-parallel
coordinate under dmuon and all of them, one after the other, under the oracle; `run.loss` carries
the factor that makes the gradients means over them. So cases in which ranks differ have a
reference too. The tensor-parallel ranks of one coordinate see the same data.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import dmuon
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.support.meshes import flat
from tests.support.models import INPUTS, OUTPUTS, Net, in_blocks, shard
from tests.support.oracle import Oracle, assert_weights_close
from tests.support.weights import (  # noqa: F401
    PLACEHOLDER_BYTES,
    assert_released,
    assert_same,
    clean_name,
    clean_weights,
    dedicated_objects,
    full_weights,
    gathered,
    named_slots,
    owned_weights,
    total,
)

BATCH = 96  # divides by 2, 3, 4 and 8, and is large enough that gradients have full rank
OF_THE_ENGINE = (  # keywords of dmuon.Muon that change no number
    "replicate_async",
    "tp_distributed_gram",
    "tp_distributed_gram_policy",
)


def regression(g):
    """Input and target of all ranks together."""
    return torch.randn(BATCH, INPUTS, generator=g), torch.randn(BATCH, OUTPUTS, generator=g)


def mean_square(model, x, y):
    return F.mse_loss(model(x).to(y.dtype), y)


@dataclass
class Run:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    ranks: list
    world_size: int
    managed: bool  # by dmuon; else this is the oracle
    called: torch.nn.Module = None  # what runs the forward: the model, or what wraps it
    steps: int = 0
    losses: list = field(default_factory=list)
    sample: Callable = regression
    criterion: Callable = mean_square

    def __post_init__(self):
        self.called = self.called or self.model

    def batch(self, step, rank, part=0, parts=1):
        """Input and target of one rank; of one micro-batch of it where `parts` is given."""
        dtype = torch.float32 if self.managed else next(self.model.parameters()).dtype
        mine = (
            t.chunk(self.world_size)[rank][part::parts]
            for t in self.sample(torch.Generator().manual_seed(step))
        )
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in mine)

    @property
    def scale(self):
        return 1.0 / len(self.ranks)

    def loss(self, step, rank, part=0, parts=1):
        x, y = self.batch(step, rank, part, parts)
        loss = self.scale * self.criterion(self.called, x, y)
        self.losses.append(loss.item())
        return loss

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def train(self, step):
        for rank in self.ranks:
            self.loss(step, rank).backward()
        self.step()

    def no_sync(self):
        return dmuon.no_sync(self.model) if self.managed else contextlib.nullcontext()

    def clip(self, max_norm, norm_type=2.0):
        if self.managed:
            return dmuon.clip_grad_norm_(self.optimizer, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)


def read_between_steps(run, readers):
    """What each `read(run, x)` sees, the first to look at its step."""
    x, _ = run.batch(0, run.ranks[0])
    for step, read in enumerate(readers):
        run.loss(step, run.ranks[0]).backward()
        run.optimizer.step()
        yield read(run, x)
        run.optimizer.zero_grad()


def three_steps(run):
    for step in range(3):
        run.train(step)


def check_parity(
    rank,
    layout,
    script=three_steps,
    *,
    make_model=Net,
    predicate=in_blocks,
    wrap=shard,
    parallelize=None,
    sample=regression,
    criterion=mean_square,
    dedicate=None,
    muon=None,
    oracle=None,
    prepare=None,
    muon_names=None,
    count_ns=True,
    transient=True,
    put=None,
):
    """Runs `script` under dmuon and under the oracle; returns the dmuon run after comparing.

    `layout` is a number of ranks, or a Layout. `parallelize(model, tp mesh)` comes before all else.
    `dedicate` and `muon` are keywords of dmuon's calls; those of `muon` that the oracle knows too
    reach it. `muon_names` says which parameters Muon trains, where that is not all the predicate
    selects. `prepare(run)` is called on all runs before the script. `put` is `put_under_dmuon`,
    which is FSDP2, or another runtime's.
    """
    layout, muon = as_layout(layout), muon or {}
    torch.manual_seed(7)
    plain = make_model()
    chosen = {n for n, p in plain.named_parameters() if (muon_names or predicate)(n, p)}
    model = copy.deepcopy(plain)
    task = {"sample": sample, "criterion": criterion}
    put = put or put_under_dmuon
    task["called"] = put(model, layout, predicate, wrap, parallelize, dedicate)
    run = _managed_run(model, layout, rank, muon, task)
    del task["called"]
    objects = dedicated_objects(model)
    _run(run, script, prepare)
    assert dedicated_objects(model) == objects, "a dedicated Parameter was replaced"
    if transient:
        assert_released(model, lambda owner: layout.holds_copy(rank, owner))
    weights, calls = full_weights(model), total(dmuon.report(model)["ns_calls"])
    mean_losses = total(run.losses) / layout.ranks if run.losses else None
    if rank == 0:
        known = {k: v for k, v in muon.items() if k not in (*OF_THE_ENGINE, "ns_backend")}
        known |= oracle or {}
        exact = _oracle_run(copy.deepcopy(plain).double(), chosen, layout, known, task)
        known |= {"ns_backend": muon.get("ns_backend", "gram")}
        single = _oracle_run(copy.deepcopy(plain), chosen, layout, known, task)
        for reference in (exact, single):
            _run(reference, script, prepare)
        _compare(weights, exact, single)
        if count_ns:
            assert calls == exact.optimizer.ns_calls, f"{calls} NS calls in the job"
        _compare_losses(mean_losses, exact)
    return run


def as_layout(layout):
    return flat(layout) if isinstance(layout, int) else layout


def put_under_dmuon(model, layout, predicate, wrap, parallelize=None, dedicate=None):
    """The calls of every training script, in their order; returns what runs the forward."""
    mesh = layout.mesh()
    if parallelize is not None:
        parallelize(model, mesh[layout.tp_name])
    dmuon.dedicate_params(model, predicate=predicate, **layout.slices(mesh), **(dedicate or {}))
    wrap(model, layout.data_mesh(mesh))
    return model


def _managed_run(model, layout, rank, muon, task):
    optimizer = dmuon.Muon(model, **copy.deepcopy(muon or {}))
    ranks = [layout.data_rank(rank)]
    return Run(model, optimizer, ranks, layout.data_ranks, managed=True, **task)


def _oracle_run(model, chosen, layout, options, task):
    optimizer, ranks = Oracle(model, chosen, **copy.deepcopy(options)), range(layout.data_ranks)
    return Run(model, optimizer, list(ranks), layout.data_ranks, managed=False, **task)


def _run(run, script, prepare):
    if prepare is not None:
        prepare(run)
    script(run)


def _compare(weights, exact, single):
    """A tied weight may go by any of its names."""
    steps, slots = max(exact.steps, 1), named_slots(exact.model)
    first = {id(p): clean_name(n) for n, p in exact.model.named_parameters()}
    weights = {first[id(slots[name])]: w for name, w in weights.items()}
    assert_weights_close(weights, clean_weights(exact.model), clean_weights(single.model), steps)


def _compare_losses(got, exact):
    if got is None:
        return
    want = sum(exact.losses)
    assert abs(got - want) <= 1e-5 * abs(want), f"losses {got}, {want}"


def cpu_mesh(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def setup(
    layout,
    *,
    make_model=Net,
    predicate=in_blocks,
    wrap=shard,
    parallelize=None,
    dedicate=None,
    muon=None,
    put=None,
    **task,
):
    """A dmuon run that nothing is compared with."""
    layout = as_layout(layout)
    torch.manual_seed(7)
    model = make_model()
    put = put or put_under_dmuon
    task["called"] = put(model, layout, predicate, wrap, parallelize, dedicate)
    return _managed_run(model, layout, dist.get_rank(), muon, task)


def errors_of_all(call):
    """Calls on this rank; returns (classes, text) of what each rank raised, None where nothing."""
    try:
        call()
        mine = None
    except Exception as error:
        mine = (tuple(c.__name__ for c in type(error).__mro__), str(error))
    return gathered(mine)


def assert_all_raise(call, kind, *words):
    """Every rank raises `kind` with one and the same text, which contains all `words`."""
    errors = errors_of_all(call)
    assert None not in errors, f"not every rank raised: {errors}"
    assert len(set(errors)) == 1, f"ranks raised different errors: {errors}"
    classes, text = errors[0]
    assert kind in classes, f"{classes[0]} instead of {kind}: {text}"
    missing = [w for w in words if w not in text]
    assert not missing, f"{missing} not in: {text}"
    return text

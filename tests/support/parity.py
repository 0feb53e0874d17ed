"""Holds a script run by dmuon on several ranks against the same script on one process.

A script is a function of a `Run`. It loops over `run.ranks`, which is this rank under dmuon and
all ranks, one after the other, under the oracle; `run.loss` carries the factor that makes the
gradients means over the ranks. So cases in which ranks differ have a reference too.
"""

import contextlib
import copy
from dataclasses import dataclass, field

import dmuon
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.models import INPUTS, OUTPUTS, Net, in_blocks, shard
from tests.support.oracle import Oracle, assert_weights_close, relative_error

BATCH = 96  # divides by 2, 3 and 4, and is large enough that gradients have full rank
PLACEHOLDER_BYTES = 16


@dataclass
class Run:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    ranks: list
    world_size: int
    managed: bool  # by dmuon; else this is the oracle
    steps: int = 0
    losses: list = field(default_factory=list)

    def batch(self, step, rank, part=0, parts=1):
        """Input and target of one rank; of one micro-batch of it where `parts` is given."""
        g = torch.Generator().manual_seed(step)
        dtype = torch.float32 if self.managed else next(self.model.parameters()).dtype
        x = torch.randn(BATCH, INPUTS, generator=g).to(dtype)
        y = torch.randn(BATCH, OUTPUTS, generator=g).to(dtype)
        piece = slice(part, None, parts)
        return x.chunk(self.world_size)[rank][piece], y.chunk(self.world_size)[rank][piece]

    @property
    def scale(self):
        return 1.0 / len(self.ranks)

    def loss(self, step, rank, part=0, parts=1):
        x, y = self.batch(step, rank, part, parts)
        loss = self.scale * F.mse_loss(self.model(x), y)
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


def three_steps(run):
    for step in range(3):
        run.train(step)


def check_parity(
    rank,
    world_size,
    script=three_steps,
    *,
    make_model=Net,
    predicate=in_blocks,
    wrap=shard,
    dedicate=None,
    muon=None,
    oracle=None,
    prepare=None,
    muon_names=None,
    count_ns=True,
    transient=True,
):
    """Runs `script` under dmuon and under the oracle; returns the dmuon run after comparing.

    `dedicate` and `muon` are keywords of dmuon's calls; those of `muon` that the oracle knows too
    reach it. `muon_names` says which parameters Muon trains, where that is not all the predicate
    selects. `prepare(run)` is called on all runs before the script.
    """
    dedicate, muon, oracle = dedicate or {}, muon or {}, oracle or {}
    torch.manual_seed(7)
    plain = make_model()
    chosen = {n for n, p in plain.named_parameters() if (muon_names or predicate)(n, p)}
    model = copy.deepcopy(plain)
    mesh = cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=predicate, **dedicate)
    wrap(model, mesh)
    run = Run(model, dmuon.Muon(model, **copy.deepcopy(muon)), [rank], world_size, managed=True)
    objects = dedicated_objects(model)
    _run(run, script, prepare)
    assert dedicated_objects(model) == objects, "a dedicated Parameter was replaced"
    if transient:
        assert_released(model)
    weights, calls = full_weights(model), total(dmuon.report(model)["ns_calls"])
    mean_losses = total(run.losses) if run.losses else None
    if rank == 0:
        known = {k: v for k, v in muon.items() if k not in ("replicate_async", "ns_backend")}
        known |= oracle
        exact = _oracle_run(copy.deepcopy(plain).double(), chosen, world_size, known)
        known |= {"ns_backend": muon.get("ns_backend", "gram")}
        single = _oracle_run(copy.deepcopy(plain), chosen, world_size, known)
        for reference in (exact, single):
            _run(reference, script, prepare)
        _compare(weights, exact, single)
        if count_ns:
            assert calls == exact.optimizer.ns_calls, f"{calls} NS calls in the job"
        _compare_losses(mean_losses, exact, world_size)
    return run


def _oracle_run(model, chosen, world_size, options):
    optimizer = Oracle(model, chosen, **copy.deepcopy(options))
    return Run(model, optimizer, list(range(world_size)), world_size, managed=False)


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


def _compare_losses(got, exact, world_size):
    if got is None:
        return
    want = sum(exact.losses)
    assert abs(got / world_size - want) <= 1e-5 * abs(want), f"losses {got / world_size}, {want}"


def cpu_mesh(world_size):
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def clean_weights(model):
    return {clean_name(n): p for n, p in model.named_parameters()}


def dedicated_objects(model):
    slots = named_slots(model)
    return {p.fqn: id(slots[clean_name(p.fqn)]) for p in dmuon.get_dedicated_params(model)}


def clean_name(name):
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def total(values):
    """Sum over the ranks (and over the list, if it is one)."""
    value = torch.tensor(float(sum(values) if isinstance(values, list) else values)).double()
    dist.all_reduce(value)
    return value.item()


def owned_weights(model):
    """Every dedicated weight by name, collected from its owner; the same on all ranks."""
    mine = {
        p.fqn: p._owned_data.detach().clone()
        for p in dmuon.get_owned_params(model, dist.get_rank())
    }
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)), f"more than one owner: {sorted(names)}"
    return {clean_name(name): w for part in parts for name, w in part.items()}


def full_weights(model):
    """Every parameter by name, whole, on every rank."""
    weights = owned_weights(model)
    dedicated = {clean_name(p.fqn) for p in dmuon.get_dedicated_params(model)}
    assert set(weights) == dedicated, f"no owner for {dedicated - set(weights)}"
    slots = named_slots(model)
    taken = {id(slots[name]) for name in dedicated}
    for name, p in model.named_parameters():
        if id(p) not in taken:
            p = p.detach()
            weights[clean_name(name)] = p.full_tensor() if isinstance(p, DTensor) else p.clone()
    return weights


def named_slots(model):
    """Every name of every parameter: a tied one has several."""
    return {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}


def assert_released(model):
    """Between uses a rank that does not own a matrix holds a few bytes of it, and no gradient."""
    theirs = {p.fqn for p in dmuon.get_dedicated_params(model) if not p.is_owner}
    for name, p in model.named_parameters():
        if clean_name(name) in {clean_name(n) for n in theirs}:
            size = p.untyped_storage().nbytes()
            assert size <= PLACEHOLDER_BYTES, f"{name}: {size} bytes between uses"


def assert_same(got, want):
    """Bitwise, by name."""
    assert got.keys() == want.keys(), f"names differ: {set(got) ^ set(want)}"
    for name in want:
        assert torch.equal(got[name], want[name]), (
            f"{name}: relative difference {relative_error(got[name], want[name]):.2e}"
        )


def setup(world_size, *, make_model=Net, predicate=in_blocks, wrap=shard, dedicate=None, muon=None):
    """A dmuon run that nothing is compared with."""
    torch.manual_seed(7)
    model, mesh = make_model(), cpu_mesh(world_size)
    dmuon.dedicate_params(model, mesh, predicate=predicate, **(dedicate or {}))
    wrap(model, mesh)
    optimizer = dmuon.Muon(model, **(muon or {}))
    return Run(model, optimizer, [dist.get_rank()], world_size, managed=True)


def errors_of_all(call):
    """Calls on this rank; returns (classes, text) of what each rank raised, None where nothing."""
    try:
        call()
        mine = None
    except Exception as error:
        mine = (tuple(c.__name__ for c in type(error).__mro__), str(error))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


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

"""What a model under dmuon holds, put together from its owners, and how two such are compared."""

import dmuon
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.oracle import relative_error

PLACEHOLDER_BYTES = 16


def clean_weights(model):
    return {clean_name(n): p for n, p in model.named_parameters()}


def clean_name(name):
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def named_slots(model):
    """Every name of every parameter: a tied one has several."""
    return {clean_name(n): p for n, p in model.named_parameters(remove_duplicate=False)}


def dedicated_objects(model):
    slots = named_slots(model)
    return {p.fqn: id(slots[clean_name(p.fqn)]) for p in dmuon.get_dedicated_params(model)}


def total(values):
    """Sum over the ranks (and over the list, if it is one)."""
    value = torch.tensor(float(sum(values) if isinstance(values, list) else values)).double()
    dist.all_reduce(value)
    return value.item()


def gathered(mine):
    """What each rank has, in rank order."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owned_weights(model):
    """Every dedicated weight by name, whole, collected from its owners; the same on all ranks."""
    owned = dmuon.get_owned_params(model, dist.get_rank())
    slots = named_slots(model)
    by_name = {}
    for rank in gathered([_piece(p, slots[clean_name(p.fqn)]) for p in owned]):
        for piece in rank:
            by_name.setdefault(clean_name(piece["name"]), []).append(piece)
    return {name: _whole(name, pieces) for name, pieces in by_name.items()}


def _piece(p, slot):
    """What this rank has of `p`: one shard of it, where it is tensor-parallel."""
    data = p._owned_data
    assert not isinstance(data, DTensor) and data.shape == p._orig_size, p.fqn
    return {
        "name": p.fqn,
        "data": data.detach().clone(),
        "dim": p.shard_dim,
        "shape": tuple(p.full_shape),
        "ranks": p.tp_group.size() if p.tp_group else 1,
        "runs": p.is_tp_owner,
        "rows": None if p.shard_dim is None else _positions(slot, p.shard_dim),
    }


def _positions(slot, dim):
    """Where in the whole weight the rows (or columns) of this rank's shard belong."""
    assert isinstance(slot, DTensor) and slot.device_mesh.ndim == 1
    (placement,) = slot.placements
    lengths = [-1 if d == dim else 1 for d in range(slot.ndim)]
    numbers = torch.arange(slot.shape[dim]).view(lengths)
    pieces, _ = placement._split_tensor(numbers, slot.device_mesh.size(), with_padding=False)
    return pieces[slot.device_mesh.get_local_rank()].flatten()


def _whole(name, pieces):
    """One piece per tensor-parallel rank of the owner, one of which runs Newton-Schulz."""
    first = pieces[0]
    assert first["ranks"] in (1, len(pieces)), f"{name}: {len(pieces)} ranks list it"
    assert [p["runs"] for p in pieces].count(True) == 1, f"{name}: not one TP owner"
    if first["dim"] is None:
        assert all(torch.equal(p["data"], first["data"]) for p in pieces[1:]), (
            f"{name}: copies differ"
        )
        return first["data"]
    rows = torch.cat([p["rows"] for p in pieces])
    whole = torch.cat([p["data"] for p in pieces], dim=first["dim"])
    assert tuple(whole.shape) == first["shape"], f"{name}: shards of {tuple(whole.shape)}"
    return whole.index_select(first["dim"], rows.argsort())


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
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            weights[clean_name(name)] = whole.clone()  # on an axis of one rank it is no copy
    return weights


def assert_released(model, holds_copy=lambda owner: False):
    """Between uses a rank that neither owns a matrix nor keeps a copy for its replica holds a few
    bytes of it, and no gradient."""
    mine = {p.fqn for p in dmuon.get_owned_params(model, dist.get_rank())}
    slots = named_slots(model)
    for p in dmuon.get_dedicated_params(model):
        if p.fqn not in mine and not holds_copy(p.owner_rank):
            size = local(slots[clean_name(p.fqn)]).untyped_storage().nbytes()
            assert size <= PLACEHOLDER_BYTES, f"{p.fqn}: {size} bytes between uses"


def assert_same(got, want):
    """Bitwise, by name."""
    assert got.keys() == want.keys(), f"names differ: {set(got) ^ set(want)}"
    for name in want:
        assert torch.equal(got[name], want[name]), (
            f"{name}: relative difference {relative_error(got[name], want[name]):.2e}"
        )

"""Process groups of dmuon's own."""

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon import _C
from dmuon.axes import Axes

# (ranks, role) -> (reference to the default group, group): a second model, or the same one set up again, makes no new
# groups, until the default group is another one.
_made: dict = {}


def control_group(like: DeviceMesh, ranks: tuple[int, ...]):
    """Collective over ``ranks``. For agreements and norms, on CPU tensors whatever the device."""
    backend = "gloo" if like.device_type != "cpu" else None
    return _group(like.get_group(), "control", ranks, backend)


def world_control_group():
    """As ``control_group`` of all ranks, before there is a mesh."""
    if not dist.is_initialized():
        raise ValueError(
            "no process group yet, so that ranks cannot agree. Call torch.distributed.init_process_group() first; "
            "start with torchrun or accelerate launch."
        )
    world = dist.group.WORLD
    backend = None if dist.get_backend() in ("gloo", "fake") else "gloo"
    return _group(world, "control", tuple(range(dist.get_world_size())), backend)


def channel_groups(axes: Axes, control, policy: str) -> "_C.GroupNames":
    """Collective over the job: a group for each axis and direction."""
    names = _C.GroupNames()
    names.control = control.group_name
    for mesh, roles in (
        (axes.shard, ("materialise", "reduce")),
        (axes.replicate, ("replicate_reduce", "publish")),
        (axes.tp, ("tp_gather", "tp_scatter")),
    ):
        if mesh is None or (mesh is not axes.shard and mesh.size() == 1):
            continue
        for role in roles:
            shared = policy == "shared"
            group = mesh.get_group() if shared else _group(mesh.get_group(), role)
            setattr(names, role, group.group_name)
    return names


def own_group(mesh: DeviceMesh, role: str):
    """Collective over the mesh. A group of its ranks that nobody else uses."""
    return _group(mesh.get_group(), role)


def _group(like, role: str, ranks: tuple[int, ...] | None = None, backend: str | None = None):
    ranks = tuple(dist.get_process_group_ranks(like)) if ranks is None else ranks
    key, world = (ranks, role), dist.group.WORLD
    if key not in _made or _made[key][0]() is not world:
        _made[key] = (
            weakref.ref(world),
            _new_group(like, ranks, role, backend or dist.get_backend(like)),
        )
    return _made[key][1]


def _new_group(like, ranks: tuple[int, ...], role: str, backend: str):
    if backend == "fake":  # a test's group of one process
        return like
    return dist.new_group(
        list(ranks),
        timeout=_timeout_of(like),
        backend=backend,
        use_local_synchronization=True,
        group_desc=f"dmuon_{role}",
    )


def _timeout_of(group):
    """The caller's: what his own group waits."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)

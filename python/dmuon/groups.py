"""Process groups of dmuon's own."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# (ranks, role) -> (default group, group): a second model, or the same one set up again, makes no new
# groups, until the default group is another one.
_made: dict = {}


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises ValueError where ``mesh`` cannot be the data-parallel mesh of this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}; it must be a DeviceMesh, for instance "
            "init_device_mesh('cuda', (world_size,))."
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"mesh has {mesh.ndim} dims {names}; it must be the data-parallel slice alone, for "
            f"instance mesh[{names[0]!r}], the one given to fully_shard."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}. Call dedicate_params "
            "on the ranks of the mesh only."
        )


def control_group(mesh: DeviceMesh):
    """Collective over the mesh. For agreements and norms, on CPU tensors whatever the device."""
    return _group(mesh, "control", backend="gloo" if mesh.device_type != "cpu" else None)


def lane_groups(mesh: DeviceMesh, policy: str):
    """Collective over the mesh. The groups of the materialise and the reduce lane."""
    if policy == "shared":
        return mesh.get_group(), mesh.get_group()
    return _group(mesh, "materialise"), _group(mesh, "reduce")


def _group(mesh: DeviceMesh, role: str, backend: str | None = None):
    group, world = mesh.get_group(), dist.group.WORLD
    key = (tuple(dist.get_process_group_ranks(group)), role)
    if key not in _made or _made[key][0] is not world:
        _made[key] = (world, _new_group(group, role, backend or dist.get_backend(group)))
    return _made[key][1]


def _new_group(group, role: str, backend: str):
    if backend == "fake":  # a test's group of one process
        return group
    return dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout_of(group),
        backend=backend,
        use_local_synchronization=True,
        group_desc=f"dmuon_{role}",
    )


def _timeout_of(group):
    """The caller's: what his own group waits."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)

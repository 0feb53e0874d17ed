"""The axes of a job: which ranks share what, found from the meshes and from the parameters."""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon.names import slots


def check_mesh(mesh: DeviceMesh, name: str = "mesh") -> None:
    """Raises ValueError where ``mesh`` cannot be a data-parallel slice of this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"{name} is a {type(mesh).__name__}; it must be a DeviceMesh, for instance "
            "init_device_mesh('cuda', (world_size,))."
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise ValueError(
            f"{name} has {mesh.ndim} dims {names}; it must be one data-parallel slice alone, for "
            f"instance mesh[{names[0]!r}], as given to fully_shard. For hybrid sharding give the shard "
            "slice as mesh and the replicate slice as replicate_mesh."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the {name} {mesh.mesh.tolist()}. Call dedicate_params "
            "on the ranks of the mesh only."
        )


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Of a 1-D mesh, in the order of its process group."""
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


@dataclass(frozen=True)
class Axes:
    """One 1-D mesh per axis of the plan; None stands for an axis of one rank."""

    shard: DeviceMesh | None
    replicate: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    tp_dim: str | None = None
    job: tuple[int, ...] = ()  # the global ranks of all axes together, sorted
    # Global rank of (replicate, shard, tp), row by row: that of a cell's TP ranks are adjacent.
    ranks: list[int] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Shard, replicate, tp."""
        return tuple(1 if m is None else m.size() for m in (self.shard, self.replicate, self.tp))

    @property
    def position(self) -> tuple[int, int, int]:
        """This rank's, on shard, replicate, tp: its rank in each axis' process group."""
        meshes = (self.shard, self.replicate, self.tp)
        return tuple(0 if m is None else dist.get_rank(m.get_group()) for m in meshes)

    @property
    def data_parallel(self) -> DeviceMesh:
        return self.replicate if self.shard is None else self.shard

    @property
    def device_type(self) -> str:
        return self.data_parallel.device_type

    @property
    def dp_names(self) -> set[str]:
        return _names(self.shard) | _names(self.replicate)

    @property
    def dp_size(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def cell_ranks(self, cell: int) -> list[int]:
        tp = self.sizes[2]
        return self.ranks[cell * tp : (cell + 1) * tp]

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank counts the elements it holds of ``parameter``: over the job each once,
        whatever mesh it lies on."""
        if not isinstance(parameter, DTensor):
            return dist.get_rank() == self.job[0]
        mesh = parameter.device_mesh
        first = self.job[0] in mesh.mesh.flatten().tolist()  # else a copy of that mesh counts
        return first and all(
            mesh.get_local_rank(i) == 0
            for i, placement in enumerate(parameter.placements)
            if placement.is_replicate()
        )


def find_axes(
    model: nn.Module,
    mesh: DeviceMesh | None,
    replicate_mesh: DeviceMesh | None,
    independent_dims: tuple[str, ...] = (),
) -> Axes:
    """The axes of the job; ``ranks`` is filled in by ``with_ranks``.

    Raises:
        ValueError: the meshes overlap or leave ranks of the job out; more than one TP dim.
    """
    if mesh is not None and replicate_mesh is not None:
        _check_apart(mesh, replicate_mesh)
    tp_dim, tp = _find_tp(
        model, replicate_mesh if mesh is None else mesh, _names(mesh) | _names(replicate_mesh)
    )
    axes = Axes(mesh, replicate_mesh, tp, tp_dim)
    for name, axis in (("mesh", mesh), ("replicate_mesh", replicate_mesh), (tp_dim, tp)):
        _check_order(name, axis)
    return replace(axes, job=_job(axes, independent_dims))


def _names(mesh: DeviceMesh | None) -> set[str]:
    return set(mesh.mesh_dim_names or ()) if mesh is not None else set()


def _check_apart(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> None:
    # Of the sizes only: every rank must say the same.
    if mesh.size() > 1 and replicate_mesh.size() > 1:
        common = set(ranks_of(mesh)) & set(ranks_of(replicate_mesh))
        if len(common) > 1:
            raise ValueError(
                f"mesh {_text(mesh)} and replicate_mesh {_text(replicate_mesh)} overlap: they share "
                "more than one rank. Give two slices of one mesh, mesh['shard'] and mesh['replicate']."
            )


def _check_order(name: str, mesh: DeviceMesh | None) -> None:
    """A rank's place on an axis is its rank in that axis' process group, which torch sorts."""
    if mesh is None:
        return
    root = _root(mesh).mesh
    dims = range(root.ndim)
    if any((root.diff(dim=d) <= 0).any() for d in dims if root.size(d) > 1):
        raise ValueError(
            f"{name} is of a mesh whose ranks are not in rising order along every dim: "
            f"{root.tolist()}. torch numbers the ranks of a group in rising order. Make the mesh so, as "
            "init_device_mesh does."
        )


def _text(mesh: DeviceMesh) -> str:
    return f"{mesh.mesh_dim_names or ''} of {mesh.size()} ranks"


def _find_tp(
    model: nn.Module, mesh: DeviceMesh, dp_names: set[str]
) -> tuple[str | None, DeviceMesh | None]:
    """The one mesh dim over which parameters are DTensors, data-parallel dims apart."""
    first = None
    for name, _, _, parameter in slots(model):
        if not isinstance(parameter, DTensor):
            continue
        _check_named(name, parameter, mesh)
        _check_not_data_parallel(name, parameter, dp_names)
        dims = tp_dims(parameter, dp_names)
        if not dims:
            continue
        if len(dims) > 1:
            raise ValueError(
                f"parameter {name!r} is a DTensor over the dims {tuple(dims)} beside the data-parallel "
                "ones; one tensor-parallel dim is supported. Flatten them into one mesh dim."
            )
        whole = parameter.device_mesh
        tp = whole if whole.ndim == 1 else whole[dims[0]]
        if first is None:
            first = (name, dims[0], tp)
        elif ranks_of(first[2]) != ranks_of(tp):
            raise ValueError(
                f"parameters {first[0]!r} ({first[1]!r}) and {name!r} ({dims[0]!r}) are "
                "tensor-parallel over different ranks; one tensor-parallel axis is supported. Use one "
                "mesh dim for all parallelize_module calls."
            )
    return (first[1], first[2]) if first else (None, None)


def _check_named(name: str, parameter: DTensor, mesh: DeviceMesh) -> None:
    names = parameter.device_mesh.mesh_dim_names
    if names and mesh.mesh_dim_names:
        return
    raise ValueError(
        f"parameter {name!r} is a DTensor, and "
        f"{'the mesh given to dedicate_params' if names else 'its mesh'} has no dim names, so its "
        "tensor-parallel axis cannot be told from the data-parallel one. Make the mesh with "
        "init_device_mesh(..., mesh_dim_names=(...))."
    )


def _check_not_data_parallel(name: str, parameter: DTensor, dp_names: set[str]) -> None:
    names = parameter.device_mesh.mesh_dim_names
    common = [dim for dim in names if dim in dp_names]
    if common:
        raise ValueError(
            f"parameter {name!r} is a DTensor over {names}, and {common[0]!r} is a mesh given to "
            "dedicate_params as data-parallel. Give the data-parallel slices that fully_shard gets, not "
            "the tensor-parallel one, and call dedicate_params before fully_shard."
        )


def tp_dims(parameter: DTensor, dp_names: set[str]) -> list[str]:
    """Names of the mesh dims of ``parameter`` that are no data-parallel ones and have ranks to
    share."""
    mesh = parameter.device_mesh
    return [
        name
        for i, name in enumerate(mesh.mesh_dim_names)
        if name not in dp_names and mesh.size(i) > 1
    ]


def _root(mesh: DeviceMesh) -> DeviceMesh:
    root = getattr(mesh, "_get_root_mesh", None)
    return root() if root is not None else mesh


def _job(axes: Axes, independent_dims: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks of all axes together."""
    size = axes.dp_size * axes.sizes[2]
    root = _root(axes.data_parallel)
    names = root.mesh_dim_names or ()
    for name in independent_dims:
        if name not in names:
            raise ValueError(f"independent_dims has {name!r}; the mesh has the dims {names}.")
        if name in axes.dp_names or name == axes.tp_dim:
            raise ValueError(
                f"independent_dims has {name!r}, whose ranks train the same weights: it is a "
                "data-parallel or tensor-parallel dim here. Leave it out."
            )
    if size == dist.get_world_size():
        return tuple(range(size))
    kept = [name for name in names if name not in independent_dims]
    part = root[tuple(kept)] if independent_dims else root
    if size == part.size():
        return tuple(sorted(part.mesh.flatten().tolist()))
    raise ValueError(
        "the meshes do not span the job: "
        + ", ".join(
            f"{name} {_text(mesh)}"
            for name, mesh in (("mesh", axes.shard), ("replicate_mesh", axes.replicate))
            if mesh is not None
        )
        + (f", tensor parallelism over {axes.tp_dim!r} of {axes.sizes[2]}" if axes.tp else "")
        + f" make {size} of the {part.size()} ranks of the mesh {names or ''}. Give the replicate slice "
        "as replicate_mesh; call parallelize_module before dedicate_params; and name dims whose ranks "
        "train other weights (pipeline stages) in independent_dims."
    )


def with_ranks(axes: Axes, control) -> Axes:
    """Collective over ``control``, the group of the whole job."""
    shard, replicate, tp = axes.position
    sizes = axes.sizes
    if sum(size > 1 for size in sizes) <= 1 and sizes[2] == 1:
        mesh = axes.replicate if sizes[1] > 1 or axes.shard is None else axes.shard
        return _filled(axes, list(ranks_of(mesh)))
    index = (replicate * sizes[0] + shard) * sizes[2] + tp
    mine = torch.tensor([index, dist.get_rank()])
    everyone = [torch.empty_like(mine) for _ in axes.job]
    dist.all_gather(everyone, mine, group=control)
    by_index = dict(pair.tolist() for pair in everyone)
    if sorted(by_index) != list(range(len(axes.job))):
        raise ValueError(
            "the data-parallel and tensor-parallel meshes do not form one grid: two ranks have the same "
            "coordinates. Slice them from one init_device_mesh."
        )
    return _filled(axes, [by_index[i] for i in range(len(axes.job))])


def _filled(axes: Axes, ranks: list[int]) -> Axes:
    return replace(axes, ranks=ranks)

"""The seat of this process, from what `raysvc.attach_rank` was given.

1. A `raysvc.Mesh` with coordinates says all.
2. Without coordinates the rank of the launch says them: tensor-parallel ranks are next to each other, then context, then data, as
   torchrun's users, accelerate, torchtitan and Megatron have it. They differ about pipelines, so these need coordinates.
3. A torch `DeviceMesh` knows its dimensions and where this process stands; `_AXES` lists the names that hosts give them.
   torchtitan's `ParallelDims` knows its sizes; its ranks are numbered as in 2, and pipeline stages vary slowest.
4. "launched": Megatron's parallel state, else accelerate's environment, else every process is a data-parallel rank.

Always true:
- a mesh that does not have as many processes as the launch is refused, where that is known;
- a dimension of an unknown name, or one that may hold context-parallel ranks among others, is refused, and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

from raysvc.actors.mesh import Mesh, MeshRank, MeshSeat
from raysvc.client.arguments import integer, mapping
from raysvc.client.seats.launched import WHERE, launched_mesh, launched_rank, launched_seat
from raysvc.errors import ConfigError

COORDS = "attach_rank(coords)"
LAUNCHED: Literal["launched"] = "launched"
_AXES = {
    "dp": (
        "dp",
        "ddp",
        "fsdp",
        "batch",
        "dp_replicate",
        "dp_shard",
        "dp_shard_mod_ep",
        "dp_shard_in_ep",
        "data_parallel",
    ),
    "pp": ("pp",),
    "cp": ("cp", "sp"),
    "tp": ("tp", "tensor_parallel"),
}


class TorchMesh(Protocol):
    """A `torch.distributed.device_mesh.DeviceMesh`."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def get_coordinate(self) -> list[int] | None: ...


class TitanDims(Protocol):
    """A `torchtitan.distributed.ParallelDims`."""

    @property
    def dp_replicate(self) -> int: ...
    @property
    def dp_shard(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...


AnyMesh: TypeAlias = Mesh | TorchMesh | TitanDims | Literal["launched"]


def seat_asked_for(
    mesh: AnyMesh | None, coords: Mapping[str, int] | None, dp_size: int | None, rank: int | None
) -> MeshSeat:
    """The seat that the arguments of `raysvc.attach_rank` mean; without any, the launch says it.

    Raises:
        ConfigError: arguments that exclude each other; what `own_seat` raises.
    """
    if mesh is not None:
        if rank is not None or dp_size is not None:
            raise ConfigError(
                WHERE, "is given together with rank or dp_size", "leave them out: the mesh says them"
            )
        return own_seat(mesh, coords)
    if coords is not None:
        raise ConfigError(COORDS, "is given without a mesh", "give mesh=raysvc.Mesh(...) too")
    if rank is not None:
        size = integer("attach_rank(dp_size)", 1 if dp_size is None else dp_size, 1)
        return MeshSeat(Mesh(size), integer("attach_rank(rank)", rank, 0, size))
    if dp_size is not None:
        raise ConfigError(
            "attach_rank(rank)", f"is missing beside dp_size={dp_size}", "give both, or neither"
        )
    return own_seat(LAUNCHED, None)


def own_seat(mesh: AnyMesh, coords: Mapping[str, int] | None) -> MeshSeat:
    """The mesh of the group, and the seat of this process in it.

    Args:
        mesh: a `raysvc.Mesh`, a torch `DeviceMesh`, torchtitan's `ParallelDims`, or "launched".
        coords: axis -> place on it, of a `raysvc.Mesh`; an axis of size 1 may be left out.

    Raises:
        ConfigError: coordinates that are missing, unknown or out of range; a mesh of another size than the launch.
    """
    rank, world = launched_rank()
    if isinstance(mesh, Mesh):
        seat = (
            _launched_in(mesh, rank) if coords is None else MeshSeat(mesh, mesh.index(_checked(mesh, coords)))
        )
    elif coords is not None:
        raise ConfigError(
            COORDS, "is given with a mesh that knows them", "leave it out, or give a raysvc.Mesh"
        )
    elif hasattr(mesh, "mesh_dim_names"):
        seat = _of_torch(mesh)
    elif mesh == LAUNCHED:
        seat = launched_seat() or _launched_in(launched_mesh(world), rank)
    elif hasattr(mesh, "dp_shard"):
        seat = _of_titan(mesh, rank)
    else:
        raise ConfigError(WHERE, f"{mesh!r} is no mesh", "give a raysvc.Mesh, a DeviceMesh or 'launched'")
    if world is not None and world != seat.mesh.size:
        what = f"({seat.mesh}) has {seat.mesh.size} processes, and this launch has {world}"
        raise ConfigError(WHERE, what, "give every axis its size: they multiply to the number of processes")
    return seat


def _checked(mesh: Mesh, coords: Mapping[str, int]) -> MeshRank:
    given = mapping(COORDS, coords)
    if unknown := sorted(set(given) - set(MeshRank._fields)):
        raise ConfigError(COORDS, f"has no axis {unknown[0]!r}", f"name {', '.join(MeshRank._fields)}")
    own = {}
    for axis in MeshRank._fields:
        size = getattr(mesh, axis)
        if axis not in given and size > 1:
            raise ConfigError(
                COORDS, f"lacks {axis}, whose size is {size}", "give this process's place on it"
            )
        own[axis] = integer(f"{COORDS[:-1]}[{axis!r}])", given.get(axis, 0), 0, size)
    return MeshRank(**own)


def _known(rank: int | None) -> int:
    if rank is None:
        what = "are missing, and this process knows neither a process group nor RANK"
        raise ConfigError(COORDS, what, "give them, axis -> place of this process")
    return rank


def _of_titan(dims: Any, rank: int | None) -> MeshSeat:
    mesh = Mesh(dims.dp_replicate * dims.dp_shard, dims.tp, dims.pp, dims.cp)
    rest, tp = divmod(_known(rank), mesh.tp)
    rest, cp = divmod(rest, mesh.cp)
    pp, dp = divmod(rest, mesh.dp)
    return MeshSeat(mesh, mesh.index(MeshRank(dp, pp, cp, tp)))


def _launched_in(mesh: Mesh, rank: int | None) -> MeshSeat:
    rank = _known(rank)
    if mesh.pp > 1 and mesh.dp > 1:
        what = "are missing, and hosts order pipeline stages and data-parallel ranks differently"
        raise ConfigError(COORDS, what, "give them, axis -> place of this process, or a DeviceMesh")
    return MeshSeat(mesh, rank)


def _of_torch(mesh: Any) -> MeshSeat:
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate()
    axis_of = {name: axis for axis, known in _AXES.items() for name in known}
    unknown = [name for name in names if name not in axis_of]
    if unknown or not names:
        what = f"has a dimension {unknown[0]!r}" if unknown else "names no dimension"
        raise ConfigError(WHERE, what, f"name each one of {', '.join(axis_of)}")
    if {"dp_replicate", "fsdp"} <= set(names):
        what = "has a dimension 'fsdp', where torchtitan puts context-parallel ranks too"
        raise ConfigError(WHERE, what, "give torchtitan's ParallelDims")
    if place is None:
        raise ConfigError(WHERE, "does not hold this process", "give the mesh of all processes that train")
    sizes, own = dict.fromkeys(MeshRank._fields, 1), dict.fromkeys(MeshRank._fields, 0)
    for name, size, at in zip(names, mesh.shape, place, strict=True):
        axis = axis_of[name]
        sizes[axis], own[axis] = sizes[axis] * size, own[axis] * size + at
    found = Mesh(**sizes)
    return MeshSeat(found, found.index(MeshRank(**own)))

"""Reads what a launch says of its processes: torchrun, accelerate, Ray Train and Megatron.

Always true:
- nothing is imported: what a library knows is asked only where the process loaded it and began with it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from raysvc.actors.mesh import Mesh, MeshRank, MeshSeat
from raysvc.errors import ConfigError

WHERE = "attach_rank(mesh)"
MEGATRON = "megatron.core.parallel_state"
ACCELERATE = "PARALLELISM_CONFIG_{}_SIZE"  # as accelerate's `ParallelismConfig` reads it


def launched_group() -> str:
    """Returns what the ranks of one launch have in common, from the environment that torchrun or Ray Train made."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return f"ranks of {env['TORCHELASTIC_RUN_ID']}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if "MASTER_ADDR" in env:
        return f"ranks of {env['MASTER_ADDR']}:{env.get('MASTER_PORT', '')}"
    return "ranks"


def launched_rank() -> tuple[int | None, int | None]:
    """Rank and size of the process group, else RANK and WORLD_SIZE; None: nobody says so.

    Raises:
        ConfigError: a variable is not a number.
    """
    torch = sys.modules.get("torch")
    distributed: Any = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _number("RANK"), _number("WORLD_SIZE")


def launched_seat() -> MeshSeat | None:
    """The seat that Megatron's parallel state names; None: this process has none."""
    state: Any = sys.modules.get(MEGATRON)
    if state is None or not state.is_initialized():
        return None
    axes = {
        "dp": "data_parallel",
        "pp": "pipeline_model_parallel",
        "cp": "context_parallel",
        "tp": "tensor_model_parallel",
    }
    mesh = Mesh(**{axis: getattr(state, f"get_{name}_world_size")() for axis, name in axes.items()})
    coords = MeshRank(**{axis: getattr(state, f"get_{name}_rank")() for axis, name in axes.items()})
    return MeshSeat(mesh, mesh.index(coords))


def launched_mesh(world: int | None) -> Mesh:
    """The sizes that accelerate's environment names; without any, every process is a data-parallel rank.

    Args:
        world: processes of the launch.

    Raises:
        ConfigError: nobody says how many processes there are, or a variable is not a number.
    """
    if world is None:
        what = (
            "this process knows neither a process group nor WORLD_SIZE, and no Megatron that is initialized"
        )
        raise ConfigError(WHERE, what, "give raysvc.Mesh(...) and coords")
    names = ("DP_REPLICATE", "DP_SHARD", "CP", "SP", "TP")
    known = {name: _number(ACCELERATE.format(name)) for name in names}
    size = {name: 1 if value is None else value for name, value in known.items()}
    if all(value is None for value in known.values()):
        return Mesh(world)
    return Mesh(dp=size["DP_REPLICATE"] * size["DP_SHARD"], cp=size["CP"] * size["SP"], tp=size["TP"])


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.isdigit():
        raise ConfigError(f"environment {name}", f"{value!r} is not a number", "set it as the launcher does")
    return int(value)

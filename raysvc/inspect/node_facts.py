"""Collects what a node says of itself to `raysvc doctor`. Runs on the node, in a task that takes no CPU and no GPU.

Always true:
- it changes nothing but what the places of `raysvc.nodes.place` write and remove.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from raysvc.nodes.place import NodePlace

PACKAGES = ("raysvc", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy")


class NodeFacts(NamedTuple):
    """The facts of one node.

    Attributes:
        versions: of Python and of each package, "" for one that is absent.
        shm_bytes: None: no /dev/shm.
        num_gpus: that the driver shows; None: there is no driver.
        cuda: that torch was built for; None: a CPU build.
        access: name of a place -> why it cannot be used, "" when it can.
    """

    versions: dict[str, str]
    shm_bytes: int | None
    memory_bytes: int
    num_gpus: int | None
    cuda: str | None
    access: dict[str, str]


def facts_of_this_node(node: str = "", places: tuple[NodePlace, ...] = ()) -> NodeFacts:
    """Look around.

    Args:
        node: its id.
        places: to try.
    """
    import torch

    found = {name: _version(name) for name in PACKAGES}
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), **found}
    access = {place.name: place.try_there(node) for place in places}
    return NodeFacts(versions, *shared_memory(), count_gpus(), torch.version.cuda, access)


def shared_memory() -> tuple[int | None, int]:
    """Bytes of /dev/shm (None: there is none) and of memory, as a container has them."""
    from ray._common.utils import get_system_memory  # knows the limits of containers

    memory_bytes = int(get_system_memory())
    if not Path("/dev/shm").is_dir():
        return None, memory_bytes
    found = os.statvfs("/dev/shm")
    return found.f_blocks * found.f_frsize, memory_bytes


def count_gpus() -> int | None:
    """GPUs as the driver lists them, whatever Ray gave to this task; None: there is no driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def now_s(node: str) -> float:
    """The wall clock."""
    return time.time()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

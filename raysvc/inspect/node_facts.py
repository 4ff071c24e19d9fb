"""What a node says of itself to `raysvc doctor`. Runs on the node, in a task that takes no CPU and no GPU.

Always true:
- nothing stays: a file that was written is removed;
- nothing is written where the file of the asking machine is not seen.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
import uuid
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("raysvc", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy")


class StoragePlace(NamedTuple):
    """A folder that every node must reach.

    Attributes:
        name: the key of the job.
        marker: URL of a file that the asking machine wrote there.
    """

    name: str
    marker: str
    options: Mapping[str, Any]


class NodeFacts(NamedTuple):
    """Of one node.

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


def facts_of_this_node(places: tuple[StoragePlace, ...] = ()) -> NodeFacts:
    """Look around."""
    import torch

    found = {name: _version(name) for name in PACKAGES}
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), **found}
    access = {place.name: _access(place) for place in places}
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


def write_marker(name: str, url: str, options: Mapping[str, Any]) -> StoragePlace:
    """Write a file into a folder, or into the nearest one above it that is there.

    Raises:
        OSError: it cannot be written.
    """
    import fsspec

    fs, path = fsspec.core.url_to_fs(url, **options)
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        folder = Path(path)
        while not folder.is_dir():
            folder = folder.parent
        path = str(folder)
    marker = f"{path.rstrip('/')}/.raysvc-doctor-{uuid.uuid4().hex}"
    fs.pipe_file(marker, b"")
    return StoragePlace(name, fs.unstrip_protocol(marker), options)


def remove(url: str, options: Mapping[str, Any]) -> None:
    """Take a file away."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(url, **options)
    fs.rm_file(path)


def now_s() -> float:
    """The wall clock."""
    return time.time()


def _access(place: StoragePlace) -> str:
    import fsspec

    own = f"{place.marker}-{uuid.uuid4().hex}"
    try:
        fs, path = fsspec.core.url_to_fs(place.marker, **place.options)
        if not fs.exists(path):
            return "does not see a file that this machine wrote there"
        fsspec.core.url_to_fs(own, **place.options)[0].pipe_file(own, b"")
        remove(own, place.options)
    except Exception as error:  # noqa: BLE001 - whatever a store raises is the finding
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}"
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

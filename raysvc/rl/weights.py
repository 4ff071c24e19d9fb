"""Weights on their way from a trainer to its producers, as one safetensors blob: in Ray's object store, or in a file that all see.

Always true:
- nothing is pickled;
- a file appears whole or not at all, under a name of its own;
- the newest two of a run stay, and those that a producer reads; files of other runs are left alone.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    import torch

KEPT = 2  # files: a producer may still read the one before the newest
_NAME = r"weights-{run}-\d{{9}}-v\d+-[0-9a-f]{{8}}\.safetensors"


class Weights(NamedTuple):
    """Holds what `Rollouts.weights` brings.

    Attributes:
        version: to put groups under.
        tensors: name -> tensor on the CPU; give them to `load_state_dict`.
    """

    version: int
    tensors: dict[str, torch.Tensor]


def blob_of(state: Mapping[str, Any]) -> bytes:
    """A state dict as safetensors; tensors that share memory are written as often as they are named.

    Raises:
        ConfigError: a value is no tensor.
    """
    import torch
    from safetensors.torch import save

    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            what = f"has {name!r} of type {type(value).__name__}"
            raise ConfigError("publish(state_dict)", what, "give model.state_dict(), name -> tensor")
    return save({name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()})


def tensors_of(blob: Any) -> dict[str, torch.Tensor]:
    """The tensors of a blob, in memory of their own."""
    from safetensors.torch import load

    return load(bytes(blob))


def run_of(journal: str) -> str:
    """Eight letters that name a run by its folder, in the names of its files of weights."""
    return hashlib.sha256(journal.encode()).hexdigest()[:8]


def write_blob(folder: str, run: str, version: int, blob: bytes) -> tuple[str, str]:
    """Write a blob of a run into a folder or fsspec URL; returns its folder and name."""
    from raysvc.cache.store.open import absolute, open_store

    root = absolute(folder)
    store = open_store(root)
    older = _files(store.list(), run)  # a rewind makes a lower version newer, so files are counted
    number = int(older[-1].split("-")[2]) + 1 if older else 0
    name = f"weights-{run}-{number:09d}-v{version}-{uuid.uuid4().hex[:8]}.safetensors"
    store.write(name, [memoryview(blob)])
    return root, name


def remove_older(folder: str, run: str, in_use: Collection[str]) -> None:
    """Remove the files of weights of a run, but for the newest two and those in use."""
    from raysvc.cache.store.open import open_store

    store = open_store(folder)
    for name in _files(store.list(), run)[:-KEPT]:
        if name not in in_use:
            store.delete(name)


def _files(names: Collection[str], run: str) -> list[str]:
    return sorted(name for name in names if re.fullmatch(_NAME.format(run=run), name))


def read_blob(folder: str, name: str) -> bytes:
    """Returns what `write_blob` wrote.

    Raises:
        FileNotFoundError: it is gone, or this node does not see the folder.
    """
    from raysvc.cache.store.open import open_store

    return open_store(folder).read(name)

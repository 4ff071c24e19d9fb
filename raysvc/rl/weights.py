"""Weights on their way from a trainer to its producers, as one safetensors blob: in Ray's object store, or in a file that all see.

Always true:
- nothing is pickled;
- a file appears whole or not at all, under a name of its own; the newest two stay.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    import torch

KEPT = 2  # files: a producer may still read the one before the newest
_NAME = re.compile(r"weights-\d{9}-v\d+-[0-9a-f]{8}\.safetensors")


class Weights(NamedTuple):
    """What `Rollouts.weights` brings.

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


def write_blob(folder: str, version: int, blob: bytes) -> tuple[str, str]:
    """Write a blob into a folder or fsspec URL, and remove all but the newest two there; returns its folder and name."""
    from raysvc.cache.store.open import absolute, open_store

    root = absolute(folder)
    store = open_store(root)
    older = sorted(
        name for name in store.list() if _NAME.fullmatch(name)
    )  # a rewind makes a lower version newer
    number = int(older[-1].split("-")[1]) + 1 if older else 0
    name = f"weights-{number:09d}-v{version}-{uuid.uuid4().hex[:8]}.safetensors"
    store.write(name, [memoryview(blob)])
    for old in older[: 1 - KEPT]:
        store.delete(old)
    return root, name


def read_blob(folder: str, name: str) -> bytes:
    """What `write_blob` wrote.

    Raises:
        FileNotFoundError: it is gone, or this node does not see the folder.
    """
    from raysvc.cache.store.open import open_store

    return open_store(folder).read(name)

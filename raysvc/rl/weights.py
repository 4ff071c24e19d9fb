"""Weights on their way from a trainer to its producers, as one safetensors blob: in Ray's object store, or in a file that all see.

Always true:
- nothing is pickled;
- a file appears whole or not at all, under a name of its own; the newest two stay.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.errors import ConfigError

if TYPE_CHECKING:
    import torch

KEPT = 2  # files: a producer may still read the one before the newest
_NAME = re.compile(r"weights-\d{9}-[0-9a-f]{8}\.safetensors")


class Weights(NamedTuple):
    """What `Rollouts.weights` brings.

    Attributes:
        version: to put groups under.
        tensors: name -> tensor on the CPU; give them to `load_state_dict`.
    """

    version: int
    tensors: dict[str, torch.Tensor]


def blob_of(state: Mapping[str, Any]) -> bytes:
    """A state dict as safetensors; tensors that share memory are written once each.

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


def write_blob(folder: str, version: int, blob: bytes) -> str:
    """Write a blob into a folder, and remove older ones there; returns its path."""
    root = Path(folder).absolute()
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"weights-{version:09d}-{uuid.uuid4().hex[:8]}.safetensors"
    part = path.with_suffix(".part")
    part.write_bytes(blob)
    part.rename(path)
    written = sorted(
        (each for each in root.iterdir() if _NAME.fullmatch(each.name)),
        key=lambda each: each.stat().st_mtime_ns,
    )
    for old in written[:-KEPT]:
        old.unlink(missing_ok=True)
    return str(path)

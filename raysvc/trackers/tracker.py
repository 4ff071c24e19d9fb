"""The protocol of a tracker, and the facts of the run that it shows.

Always true:
- a run keeps its id in `<folder>/trackers.json`: who goes on in that folder goes on in the same run of every tracker.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from raysvc.cache.local.sealed import opened_if_sealed, sealed
from raysvc.errors import StateMismatch
from raysvc.redact import redacted

FILE = "trackers.json"
SECRET = ("storage_options",)


@dataclass(frozen=True)
class TrackedRun:
    """Holds what a tracker is opened with.

    Attributes:
        id: the same for a run and whatever continues it.
        name: for display.
        folder: of the run; trackers that write files write them there.
        config: plain JSON, without secrets.
        steps_done: steps trained before; larger when the run goes on.
    """

    id: str
    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    steps_done: int = 0


class Tracker(Protocol):
    """Told of a run by a thread beside the training. `step` counts steps trained; metrics are named as HF's Trainer does.

    Whatever it raises ends this tracker alone, and is said once.
    """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is trained: `loss`, `grad_norm`, `learning_rate`, `epoch`, `num_input_tokens_seen` and more."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """An eval is over: `eval_<name>_loss` and more."""

    def on_checkpoint(self, step: int, folder: str) -> None:
        """A checkpoint is complete."""

    def on_end(self, metrics: Mapping[str, float], finished: bool) -> None:
        """Nothing more comes; `finished`: all steps are trained. Close what is open."""


def tracked_run(
    folder: Path, name: str | None = None, config: Mapping[str, Any] | None = None, steps_done: int = 0
) -> TrackedRun:
    """The run of a folder; its first call chooses the id.

    Raises:
        StateMismatch: the file with the id is damaged.
    """
    folder = folder.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if not path.exists():
        draft = folder / f".{FILE}.{uuid.uuid4().hex[:8]}"
        draft.write_bytes(sealed({"id": uuid.uuid4().hex[:12]}))
        draft.rename(path)
    try:
        run_id = str(opened_if_sealed(path.read_bytes().rstrip(b"\n"))["id"])
    except (ValueError, KeyError):
        remedy = "restore it, or remove it: trackers then begin a new run"
        raise StateMismatch(str(path), "is not what was written", remedy) from None
    return TrackedRun(run_id, name or folder.name, folder, without_secrets(config or {}), steps_done)


def without_secrets(value: Any) -> Any:
    """Plain JSON to show to others: no storage options, no passwords in URLs."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(each) for key, each in value.items() if key not in SECRET}
    if isinstance(value, list | tuple):
        return [without_secrets(each) for each in value]
    return redacted(value) if isinstance(value, str) else value


def under_headings(metrics: Mapping[str, float]) -> dict[str, float]:
    """Names as HF's Trainer shows them in Weights & Biases, TensorBoard and Trackio: `train/loss`, `eval/loss`."""
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in metrics.items()
    }

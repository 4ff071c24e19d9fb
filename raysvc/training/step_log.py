"""Logs of a run: JSON lines with a `step` in each, that go on where a checkpoint says.

1. On a resume at step k the lines of the steps below k are copied to a new file, which takes the place of the old one: a process that
   slept and still has the old one open writes into nothing.
2. The copy ends at the first line of a step from k on, or at a line that is not whole: what a killed run left at its end.
3. Where a line below k is missing then, the log has a hole, and the resume is refused by name.

Always true:
- a line is in the file when `append` returns;
- after a resume at step k the file holds the lines of all steps below k, and nothing else;
- a reader skips a torn line at the end, and is told of any other line that is damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raysvc.cache.store.disk_failures import named_failures
from raysvc.errors import StateMismatch

log = logging.getLogger(__name__)
_STEP = re.compile(rb'\{"step": ?(\d+)[,}]')


class StepLog:
    """One log; one writer."""

    def __init__(self, path: Path, start_step: int, *, every_step: bool = False) -> None:
        """Keep the lines of steps below `start_step`, and append from there.

        Args:
            every_step: each step has lines; `mini` counts those of one step, where they have it.

        Raises:
            StateMismatch: it lacks lines of steps below `start_step`, or they are damaged.
        """
        self._path = path
        with named_failures(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = _kept(path, start_step, every_step) if path.exists() else b""
            if not path.exists() and every_step and start_step:
                _refuse(path, f"is not there, and the checkpoint has {start_step} steps")
            draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
            draft.write_bytes(kept)
            self._file = os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.fsync(self._file)
            draft.rename(path)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line; it is in the file when this returns.

        Raises:
            StoreError: the disk is full, or cannot be written.
        """
        data = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        with named_failures(self._path):
            while data:
                data = data[os.write(self._file, data) :]

    def sync(self) -> None:
        """Make all lines survive a power cut."""
        with named_failures(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; none where there is none.

    Raises:
        StateMismatch: one that is not the last is damaged.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            line = _parsed(data)
            if line is not None:
                yield line
            elif data.endswith(b"\n"):
                _refuse(path, f"has a damaged line {number}")


def _kept(path: Path, step: int, every_step: bool) -> bytes:
    """The lines of the steps below `step`."""
    data = path.read_bytes()
    begin, last, mini = 0, -1, -1
    while begin < len(data):
        end = data.find(b"\n", begin) + 1
        line = _parsed(data[begin:end]) if end else None
        if line is None:
            torn = _STEP.match(data[begin : begin + 64])
            if torn is not None and int(torn[1]) < step:
                _refuse(path, f"has a torn line of step {int(torn[1])}, and the checkpoint has {step} steps")
            break
        if line["step"] >= step:
            break
        if every_step:
            _refuse_hole(path, line, last, mini)
        last, mini = line["step"], line.get("mini", -1)
        begin = end
    if every_step and last != step - 1:
        _refuse(path, f"lacks step {last + 1}, and the checkpoint has {step} steps")
    return data[:begin]


def _refuse_hole(path: Path, line: Mapping[str, Any], last: int, mini: int) -> None:
    step, first = line["step"], line.get("mini", 0)
    goes_on = step == last + 1 and first == 0
    if not goes_on and not ("mini" in line and step == last and first == mini + 1):
        _refuse(path, f"goes from step {last} to step {step} without what lies between")


def _parsed(data: bytes) -> dict[str, Any] | None:
    """None for a line that is not whole."""
    if not data.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError):
        line = json.loads(data)
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            return line
    return None


def _refuse(path: Path, what: str) -> None:
    remedy = (
        "restore the file, or remove the checkpoints above the last whole step, or give trainer.resume=false"
    )
    raise StateMismatch(str(path), what, remedy)

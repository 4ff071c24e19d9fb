"""Logs of a run: JSON lines with a `step` in each, that go on where a checkpoint says.

1. A log counts its bytes and keeps their digest; both are its `Extent`, and a checkpoint keeps that.
2. A resume copies the bytes that its checkpoint counted to a new file, which takes the place of the old one: a process that slept and still
   has the old one open writes into nothing. What lies behind them, a killed run left.
3. The copy is digested as it is made: where it has another digest the resume is refused by name, and the file stays as it is.

Always true:
- a line is in the file when `append` returns;
- after a resume the file holds what it held when the checkpoint was made, and nothing else;
- a reader skips a torn line at the end, and is told of any other line that is damaged, and of bytes that the newest checkpoint knows otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from raysvc.cache.store.disk_failures import named_failures
from raysvc.errors import StateMismatch

PIECE = 1 << 20  # bytes that are copied at once


class Extent(NamedTuple):
    """Says how many bytes a log has, and their digest (XXH3-128)."""

    num_bytes: int
    digest: str


NOTHING = Extent(0, xxhash.xxh3_128_hexdigest(b""))


class StepLog:
    """One log; one writer."""

    def __init__(self, path: Path, kept: Extent = NOTHING) -> None:
        """Keep what a checkpoint counted, and append from there.

        Raises:
            StateMismatch: these bytes are not there any more.
        """
        self._path, self._num_bytes, self._digest = path, 0, xxhash.xxh3_128()
        with named_failures(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
            self._file = os.open(
                draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            try:
                for piece in _beginning(path, kept.num_bytes):
                    self._write(piece)
                _refuse_unless(path, kept, self.extent)
                os.fsync(self._file)
                draft.rename(path)
            except BaseException:
                self.close()
                draft.unlink()
                raise

    @property
    def extent(self) -> Extent:
        """What is in the file."""
        return Extent(self._num_bytes, self._digest.hexdigest())

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one line; it is in the file when this returns.

        Raises:
            StoreError: the disk is full, or cannot be written.
        """
        with named_failures(self._path):
            self._write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def sync(self) -> None:
        """Make all lines survive a power cut."""
        with named_failures(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            count = os.write(self._file, left)
            self._digest.update(left[:count])
            self._num_bytes, left = self._num_bytes + count, left[count:]


def lines_of(path: Path, kept: Extent = NOTHING) -> Iterator[dict[str, Any]]:
    """The whole lines of a log; none where there is none.

    Args:
        kept: what a checkpoint counted.

    Raises:
        StateMismatch: a line that is not the last is damaged, or what the checkpoint counted is not there any more.
    """
    num_bytes, digest = 0, xxhash.xxh3_128()
    with path.open("rb") if path.exists() else contextlib.nullcontext(()) as file:
        for number, data in enumerate(file, start=1):
            if num_bytes < kept.num_bytes:
                num_bytes += len(data)
                digest.update(data)
                if num_bytes >= kept.num_bytes:
                    _refuse_unless(path, kept, Extent(num_bytes, digest.hexdigest()))
            line = _parsed(data)
            if line is not None:
                yield line
            elif data.endswith(b"\n"):
                _refuse(path, f"has a damaged line {number}")
    if num_bytes < kept.num_bytes:
        _refuse_unless(path, kept, Extent(num_bytes, digest.hexdigest()))


def _beginning(path: Path, num_bytes: int) -> Iterator[bytes]:
    """The first bytes of a file, as many as there are."""
    if num_bytes and path.exists():
        with path.open("rb", buffering=0) as file:
            while num_bytes and (data := file.read(min(num_bytes, PIECE))):
                num_bytes -= len(data)
                yield data


def _parsed(data: bytes) -> dict[str, Any] | None:
    """None for a line that is not whole."""
    if not data.endswith(b"\n"):
        return None
    with contextlib.suppress(ValueError):
        line = json.loads(data)
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            return line
    return None


def _refuse_unless(path: Path, kept: Extent, found: Extent) -> None:
    if found.num_bytes < kept.num_bytes:
        what = f"has {found.num_bytes} of the {kept.num_bytes} bytes that it had when the checkpoint was made"
        _refuse(path, what if path.exists() else "is not there, and the checkpoint counts on it")
    if found != kept:
        _refuse(
            path,
            f"is damaged: its first {kept.num_bytes} bytes are not those that it had when the checkpoint was made",
        )


def _refuse(path: Path, what: str) -> None:
    remedy = "restore the file, or remove the checkpoints that were made after it was whole, or give trainer.resume=false"
    raise StateMismatch(str(path), what, remedy)

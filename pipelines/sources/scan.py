"""One look through a file: what its content is, and where it is cut into slices.

Always true:
- cuts are in the order of the rows, they touch and do not overlap;
- a cut of a line file starts and ends at a line's end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from raysvc.pipelines.sources.files import COMPRESSED, Kind, kind_of, open_file

READ_BYTES = 8 << 20
PEEK_BYTES = 1 << 16
Cut = tuple[int, int, int]  # start, end, rows; bytes of a line file, else rows


@dataclass(frozen=True)
class FileScan:
    """What one look through a file gives.

    Attributes:
        size, sha256: of the content, uncompressed.
        cuts: of the slices.
    """

    kind: Kind
    size: int
    sha256: str
    cuts: tuple[Cut, ...]


def scan_file(path: str, slice_bytes: int, storage_options: dict[str, Any]) -> FileScan:
    """Read a file once."""
    kind = kind_of(path)
    digest = hashlib.sha256()
    size = 0
    cutter = LineCutter(slice_bytes)
    with open_file(path, storage_options) as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
            if kind == "json" and size == 0:
                kind = _kind_of_json(block)
            size += len(block)
            if kind == "lines":
                cutter.feed(block)
    if kind == "lines" and not path.endswith(COMPRESSED):
        cuts = cutter.finish()
    elif kind == "lines":
        cuts = [(0, size, sum(rows for _, _, rows in cutter.finish()))]
    else:
        from raysvc.pipelines.sources.readers import count_rows

        rows = count_rows(path, kind, storage_options)
        cuts = even_cuts(rows, max(1, min(rows, -(-size // slice_bytes))) if rows else 0)
    return FileScan(kind, size, digest.hexdigest(), tuple(cuts))


def peek_kind(path: str, storage_options: dict[str, Any]) -> Kind:
    """The kind by the name, and by the first bytes of a `.json` file."""
    kind = kind_of(path)
    if kind != "json":
        return kind
    with open_file(path, storage_options) as stream:
        return _kind_of_json(stream.read(PEEK_BYTES))


def _kind_of_json(begin: bytes) -> Kind:
    """A list of rows, or one object per line."""
    return "json" if begin.lstrip().startswith(b"[") else "lines"


def even_cuts(num_rows: int, num_slices: int) -> list[Cut]:
    """Cut rows into slices whose sizes differ by at most one: (start, end, rows) each, half-open."""
    edges = [num_rows * i // num_slices for i in range(num_slices + 1)] if num_slices else [0]
    return [(a, b, b - a) for a, b in pairwise(edges)]


class LineCutter:
    """Finds slice ends at line ends while a file streams by; counts lines (the last may lack its newline)."""

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._cuts: list[Cut] = []
        self._start = 0  # of the open slice
        self._rows = 0  # lines ended in the open slice
        self._read = 0
        self._open_line = False

    def feed(self, block: bytes) -> None:
        pos = 0
        while pos < len(block):
            target = self._start + self._slice_bytes - self._read  # block offset where the slice is full
            if target >= len(block):
                self._rows += block.count(b"\n", pos)
                break
            cut = block.find(b"\n", max(target, pos))
            if cut < 0:
                self._rows += block.count(b"\n", pos)
                break
            rows = self._rows + block.count(b"\n", pos, cut + 1)
            end = self._read + cut + 1
            self._cuts.append((self._start, end, rows))
            self._start, self._rows, pos = end, 0, cut + 1
        self._read += len(block)
        self._open_line = not block.endswith(b"\n")

    def finish(self) -> list[Cut]:
        if self._read > self._start:
            self._cuts.append((self._start, self._read, self._rows + self._open_line))
        return self._cuts

"""Finds what was appended to a file of lines, as far as it is complete: slices by range of bytes.

Always true:
- a range begins and ends at a line's end, and is never cut again otherwise;
- a line counts once its newline is there;
- a file whose bytes before the range are not those that were counted is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

from raysvc.errors import SourceError
from raysvc.pipelines.reading.pinned_file import reading
from raysvc.pipelines.reading.pins import BLOCK_BYTES, PinHasher, Pins, changed
from raysvc.pipelines.sources.cuts import LineCutter
from raysvc.pipelines.sources.files import COMPRESSED, LINE_KINDS, SourceFile, kind_of
from raysvc.pipelines.sources.slices import Piece

READ_BYTES = 8 << 20
LOOK_BACK_BYTES = 1 << 16
REMEDY = "restore it and write to a file of a new name, or begin again in another cache.root"


def may_grow(file: SourceFile) -> bool:
    """Returns whether lines may be appended to a file: one of lines, not compressed, in a folder."""
    return "://" not in file.path and not file.path.endswith(COMPRESSED) and kind_of(file.path) in LINE_KINDS


@dataclass(frozen=True)
class CountedLines:
    """Holds what of a file is counted.

    Attributes:
        end: bytes.
        digest: XXH3-128 of the last block of these, which begins at a multiple of `BLOCK_BYTES`.
    """

    end: int = 0
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"end": self.end, "digest": self.digest}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CountedLines:
        """Returns what `to_json` gave."""
        return cls(raw["end"], raw["digest"])


def appended(
    path: str, counted: CountedLines, slice_bytes: int, most_bytes: int
) -> tuple[CountedLines, list[Piece]]:
    """Returns what is complete behind `counted`, in pieces; none where nothing is.

    Args:
        most_bytes: about as many are taken, and the rest is left for the next call.

    Raises:
        SourceError: the file is shorter than what is counted, or its bytes there are others; it cannot be read.
    """
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < counted.end:
            raise shorter(path, counted.end, size)
        end = _last_line_end(file, counted.end, min(size, counted.end + most_bytes))
        if end == counted.end < size - most_bytes:  # one line is longer
            end = _last_line_end(file, counted.end, size)
        if end == counted.end:
            return counted, []
        return _taken(path, file, counted, end, slice_bytes)


def shorter(path: str, counted: int, size: int) -> SourceError:
    """A file of lines lost some of them."""
    what = f"has {size} bytes, and {counted} of them are counted"
    return SourceError(f"source file {path!r}", what, REMEDY)


def written_over(path: str) -> SourceError:
    """Returns what is counted of a file is other bytes now."""
    return SourceError(f"source file {path!r}", "is counted, and has changed since", REMEDY)


def _last_line_end(file: BinaryIO, begin: int, end: int) -> int:
    """Behind the last newline in [begin, end); `begin` where there is none."""
    while end > begin:
        low = max(begin, end - LOOK_BACK_BYTES)
        file.seek(low)
        found = file.read(end - low).rfind(b"\n")
        if found >= 0:
            return low + found + 1
        end = low
    return begin


def _taken(
    path: str, file: BinaryIO, counted: CountedLines, end: int, slice_bytes: int
) -> tuple[CountedLines, list[Piece]]:
    low = _block(counted.end)
    file.seek(low)
    before = file.read(counted.end - low)
    if before and xxhash.xxh3_128_hexdigest(before) != counted.digest:
        raise written_over(path)
    hasher, cutter = PinHasher(BLOCK_BYTES), LineCutter(slice_bytes)
    hasher.feed(before)
    at, last = counted.end, before
    while at < end:
        block = file.read(min(READ_BYTES, end - at))
        if not block:
            raise changed(path)
        hasher.feed(block)
        cutter.feed(block)
        at += len(block)
        last = (last + block)[-BLOCK_BYTES:]
    pins = Pins(end, BLOCK_BYTES, low // BLOCK_BYTES, hasher.finish().digests)
    kind = kind_of(path)
    pieces = [
        Piece(path, kind, counted.end + a, counted.end + b, rows, b - a, pins.span(counted.end + a, counted.end + b))
        for a, b, rows in cutter.finish()
    ]  # fmt: skip
    tail = last[len(last) - (end - _block(end)) :]
    return CountedLines(end, xxhash.xxh3_128_hexdigest(tail)), pieces


def _block(position: int) -> int:
    """Returns where the block that holds the byte before `position` begins."""
    return max(position - 1, 0) // BLOCK_BYTES * BLOCK_BYTES

"""A slice: rows that one task reads, tokenizes and writes as one part.

A large file gives many slices; many small files share one.

Always true:
- slices are in the order of the rows, they touch and do not overlap;
- `first_row` numbers rows over all files of the source, broken lines included;
- the pieces of a slice are all lines, or all of other kinds;
- how a source is cut depends on its bytes alone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from raysvc.cache.key import canonical_json
from raysvc.pipelines.reading.pins import Pins
from raysvc.pipelines.sources.cuts import MAX_LINE_BYTES
from raysvc.pipelines.sources.files import CSV_KINDS, LINE_KINDS, Kind
from raysvc.redact import redacted

MOST_PIECES = 1024  # of one slice: what a file costs to open bounds a slice too


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one file.

    Attributes:
        path: of the file; for a `datasets` name the JSON of its config.
        start, end: bytes of a file of `BYTE_KINDS`, else rows of the file.
        num_rows: rows (lines) in it.
        num_bytes: its share of the file.
        pins: what its bytes were when the file was scanned; None for a `datasets` name.
        fingerprint: of a `datasets` name, as it was when the source was looked at.
        head: base64 of what the bytes are read behind, where they are not the file's first.
        skip: rows of an Arrow file's range that come before the first one.
    """

    path: str
    kind: Kind
    start: int
    end: int
    num_rows: int
    num_bytes: int
    pins: Pins | None = None
    fingerprint: str = ""
    head: str = ""
    skip: int = 0

    @property
    def is_long_line(self) -> bool:
        """One line, or row of a CSV file, over the limit: it is counted and never read."""
        return (
            self.kind in (*LINE_KINDS, *CSV_KINDS)
            and self.num_rows == 1
            and self.end - self.start > MAX_LINE_BYTES
        )


@dataclass(frozen=True)
class Slice:
    """Rows that one task turns into one part.

    Attributes:
        index: position in the source; the part has the same.
        first_row: number of its first row in the whole source.
        num_rows: rows in it.
    """

    index: int
    first_row: int
    num_rows: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its share of the files' contents."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def is_lines(self) -> bool:
        """Returns whether its rows are lines of JSON."""
        return self.pieces[0].kind == "lines"

    def path_of(self, source_row: int) -> str:
        """Returns the path of the file that a row lies in."""
        behind = accumulate((piece.num_rows for piece in self.pieces), initial=self.first_row)
        starts = list(behind)[:-1]
        return self.pieces[max(bisect_right(starts, source_row) - 1, 0)].path

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for task arguments."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Slice:
        """Returns what `to_json` gave."""
        return cls(**{**raw, "pieces": tuple(_piece(one) for one in raw["pieces"])})

    def identity(self) -> dict[str, Any]:
        """Returns what makes two slices the same piece of work, wherever the files lie: rows and content."""
        content = [
            [
                one.start,
                one.end,
                one.skip,
                one.num_rows,
                one.fingerprint,
                *(one.pins.digests if one.pins else ()),
            ]
            for one in self.pieces
        ]
        digest = hashlib.sha256(canonical_json({"pieces": content})).hexdigest()
        return {"index": self.index, "first_row": self.first_row, "num_rows": self.num_rows, "bytes": digest}


def _piece(raw: Mapping[str, Any]) -> Piece:
    pins = raw["pins"]
    return Piece(**{**raw, "pins": pins and Pins(**{**pins, "digests": tuple(pins["digests"])})})


def packed(pieces: Iterable[Piece], slice_bytes: int) -> tuple[Slice, ...]:
    """Slices of pieces in the order of the rows: as many to a slice as fit."""
    slices: list[Slice] = []
    row = 0
    for group in _groups(pieces, slice_bytes):
        rows = sum(piece.num_rows for piece in group)
        slices.append(Slice(len(slices), row, rows, tuple(group)))
        row += rows
    return tuple(slices)


def _groups(pieces: Iterable[Piece], slice_bytes: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        full = size + piece.num_bytes > slice_bytes or len(group) == MOST_PIECES
        if group and (full or (piece.kind == "lines") != (group[0].kind == "lines")):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.num_bytes
    if group:
        yield group


def place_of_row(slices: Iterable[Slice], source_row: int) -> str:
    """Says where a row of a source lies: the line or row of a file, counted from 1; "" where that is not known."""
    before: Counter[str] = Counter()  # rows of each file
    for one in slices:
        at = one.first_row
        for piece in one.pieces:
            if at <= source_row < at + piece.num_rows and piece.kind != "dataset":
                line = before[piece.path] + source_row - at + 1
                return f"{'line' if piece.kind in LINE_KINDS else 'row'} {line} of {redacted(piece.path)}"
            before[piece.path] += piece.num_rows
            at += piece.num_rows
    return ""

"""A slice: a piece of one file that one task reads, tokenizes and writes as one part.

Always true:
- slices are in the order of the rows, they touch and do not overlap;
- `first_row` numbers rows over all files of the source, broken lines included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from raysvc.pipelines.sources.files import Kind
from raysvc.pipelines.sources.scan import Cut


@dataclass(frozen=True)
class Slice:
    """Rows that one task turns into one part.

    Attributes:
        index: position in the source; the part has the same.
        path: of the file; for a `datasets` source the JSON of its config.
        start, end: bytes of a line file, else rows of the file.
        first_row: number of its first row in the whole source.
        num_rows: rows (lines) in it.
    """

    index: int
    path: str
    kind: Kind
    start: int
    end: int
    first_row: int
    num_rows: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, for receipts and task arguments."""
        return asdict(self)


def numbered(pieces: Iterable[tuple[str, Kind, Cut]]) -> tuple[Slice, ...]:
    """Slices of cuts in the order of the rows: path, kind and cut of each."""
    slices: list[Slice] = []
    row = 0
    for path, kind, (start, end, rows) in pieces:
        slices.append(Slice(len(slices), path, kind, start, end, row, rows))
        row += rows
    return tuple(slices)

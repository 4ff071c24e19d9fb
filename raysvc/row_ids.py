"""The id of a row is its address: `source << 52 | slice << 32 | row in the slice`, written `source:slice:row`.

Axes: P rows.
Always true:
- the number of a row does not depend on how many rows other slices have, so it is known before they are;
- numbers ascend by source, slice and row;
- `split` undoes `join`, `parse` undoes `written`, and `RowPlaces.positions_of` undoes `ids_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, overload

import numpy as np

from raysvc.ragged import Int64s

MOST_SLICES = 1 << 20  # of one source
MOST_SOURCES = 1 << 11
_SLICE, _SOURCE = np.int64(32), np.int64(52)


class SlicedPlace(NamedTuple):
    """Source, slice, and row (or group) in the slice; int64 [P] each."""

    source: Int64s
    slice: Int64s
    row: Int64s


def join(slices: Int64s, rows: Int64s | np.int64) -> Int64s:
    """Numbers of rows of source 0; add `source_base` for another one."""
    return (slices << _SLICE) | rows


@overload
def slice_base(first: int) -> int: ...
@overload
def slice_base(first: Int64s) -> Int64s: ...
def slice_base(first: int | Int64s) -> int | Int64s:
    """Returns what is added to numbers whose slices are counted from `first` on: the id of the first row of that slice."""
    return first << int(_SLICE)


@overload
def source_base(source: int) -> int: ...
@overload
def source_base(source: Int64s) -> Int64s: ...
def source_base(source: int | Int64s) -> int | Int64s:
    """Returns what is added to the numbers of a mixture's source."""
    return source << int(_SOURCE)


def split(ids: Int64s) -> SlicedPlace:
    """Returns where rows lie."""
    return SlicedPlace(
        ids >> _SOURCE, (ids >> _SLICE) & np.int64(MOST_SLICES - 1), ids & np.int64((1 << int(_SLICE)) - 1)
    )


def written(row_id: int) -> str:
    """An id as it is shown, logged and typed: `2:17:451`."""
    return f"{row_id >> int(_SOURCE)}:{(row_id >> int(_SLICE)) % MOST_SLICES}:{row_id % (1 << int(_SLICE))}"


def parse(text: str) -> int:
    """An id as it was shown, or typed: `2:17:451`, `17:451` of the first source, or the one number of all three.

    Raises:
        ValueError: it has another form, or is too large.
    """
    fields = [field.strip() for field in text.split(":")]
    if not 1 <= len(fields) <= 3 or not all(field.isascii() and field.isdecimal() for field in fields):
        raise ValueError(f"{text!r} is not a row id such as 0:17:451")
    if len(fields) == 1:
        found = int(fields[0])
    else:
        source, piece, row = map(int, ["0", *fields][-3:])
        if source >= MOST_SOURCES or piece >= MOST_SLICES or row >= 1 << int(_SLICE):
            raise ValueError(f"{text} is too large for the id of a row")
        found = source_base(source) + slice_base(piece) + row
    if found >= 1 << 63:
        raise ValueError(f"{text} is too large for the id of a row")
    return found


def parsed(value: Any) -> Any:
    """Returns what `parse` makes of a text; anything else as it is."""
    return parse(value) if isinstance(value, str) else value


class RowPlaces:
    """Rows that lie slice after slice and source after source: the id of each position, and the position of each id.

    Args:
        starts: of each source, int64 [S + 1]: the first position of each of its slices, and where they end.
    """

    def __init__(self, starts: Sequence[Int64s]) -> None:
        ends = np.cumsum([0, *(int(one[-1]) for one in starts)])
        firsts = [one[:-1] + end for one, end in zip(starts, ends, strict=False)]
        ids = [
            join(np.arange(len(one) - 1, dtype=np.int64), np.int64(source_base(number)))
            for number, one in enumerate(starts)
        ]
        self._firsts = np.concatenate([*firsts, ends[-1:]]).astype(np.int64)
        self._ids = np.concatenate([*ids, np.zeros(0, np.int64)])
        self._chosen: Int64s | None = None  # positions that have a position of their own; None: all

    @classmethod
    def of_rows(cls, num_rows: int) -> RowPlaces:
        """Describes rows without slices, whose id is their position."""
        return cls([np.append(np.arange(0, max(num_rows, 1), 1 << int(_SLICE)), num_rows)])

    def among(self, chosen: Int64s) -> RowPlaces:
        """Those of some of the rows: position p is that of row `chosen[p]`; int64 [M], ascending."""
        some = copy(self)
        some._chosen = chosen
        return some

    def ids_of(self, positions: Int64s) -> Int64s:
        """The ids of rows at these positions."""
        positions = positions if self._chosen is None else self._chosen[positions]
        slices = np.searchsorted(self._firsts[:-1], positions, side="right") - 1
        ids: Int64s = self._ids[slices] + (positions - self._firsts[slices])
        return ids

    def positions_of(self, ids: Int64s) -> Int64s:
        """The positions of rows.

        Raises:
            IndexError: a row that is not there.
        """
        slices = np.searchsorted(self._ids, ids, side="right") - 1
        found: Int64s = self._firsts[slices] + (ids - self._ids[slices])
        gone = (slices < 0) | (found >= self._firsts[slices + 1])
        if gone.any():
            raise IndexError(f"there is no row {written(ids[int(np.argmax(gone))])}")
        if self._chosen is None:
            return found
        places = np.searchsorted(self._chosen, found)
        gone = np.append(self._chosen, -1)[places] != found
        if gone.any():
            raise IndexError(f"row {written(ids[int(np.argmax(gone))])} is not among the chosen ones")
        return places

"""Numbers of rows that name their slice: `source << 52 | slice << 32 | row in the slice`.

Axes: P rows.
Always true:
- the number of a row does not depend on how many rows other slices have, so it is known before they are;
- numbers ascend by source, slice and row;
- `split` undoes `join`.
"""

from __future__ import annotations

from typing import NamedTuple

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


def join(slices: Int64s, rows: Int64s) -> Int64s:
    """Numbers of rows of source 0; add `source_base` for another one."""
    return (slices << _SLICE) | rows


def slice_base(first: int) -> int:
    """What is added to numbers whose slices are counted from `first` on."""
    return first << int(_SLICE)


def source_base(source: int) -> int:
    """What is added to the numbers of a mixture's source."""
    return source << int(_SOURCE)


def split(ids: Int64s) -> SlicedPlace:
    """Where rows lie."""
    return SlicedPlace(
        ids >> _SOURCE, (ids >> _SLICE) & np.int64(MOST_SLICES - 1), ids & np.int64((1 << int(_SLICE)) - 1)
    )

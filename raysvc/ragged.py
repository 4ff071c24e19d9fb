"""Ragged rows in flat arrays: where each begins, and which cells some of them cover.

Axes: N rows, T cells of all N rows one after the other.
Always true:
- row n covers the cells `offsets[n]:offsets[n + 1]`;
- `cells_of_runs` is the concatenation of `arange(start, start + length)` of every run, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def offsets_of(lengths: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Int64s:
    """int64 [N + 1], where each of N rows of `lengths` begins, and the end of the last.

    >>> offsets_of([2, 0, 3]).tolist()
    [0, 2, 2, 5]
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def cells_of_runs(starts: Int64s, lengths: Int64s) -> Int64s:
    """int64 [T], the cells of N runs one after the other.

    >>> cells_of_runs(np.array([10, 4]), np.array([2, 3])).tolist()
    [10, 11, 4, 5, 6]
    """
    offsets = offsets_of(lengths)
    return np.arange(int(offsets[-1])) + np.repeat(starts - offsets[:-1], lengths)

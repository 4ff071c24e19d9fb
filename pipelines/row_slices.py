"""Rows of an entry, cut into what one worker computes at a time.

Axes: N rows.

Always true:
- slices are in the order of the rows, they touch and do not overlap; a row is never cut;
- how an entry is cut depends on the lengths of its rows and on the bytes of a token's columns alone, never on workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

SLICES = 64
LEAST_TOKENS, MOST_TOKENS = 1 << 16, 1 << 20  # of a slice: what a kill costs, and what a part's overhead does
MOST_BYTES = 1 << 26  # of the columns of a slice


@dataclass(frozen=True)
class RowSlice:
    """Consecutive rows.

    Attributes:
        index: number of the slice.
        first_row, num_rows: of the entry.
    """

    index: int
    first_row: int
    num_rows: int

    def to_json(self) -> list[int]:
        """Plain JSON; `RowSlice(*json)` is the slice again."""
        return [self.index, self.first_row, self.num_rows]


def row_slices(lengths: npt.NDArray[np.integer[Any]], bytes_per_token: int) -> tuple[RowSlice, ...]:
    """Slices of a 64th of the tokens, within bounds.

    Args:
        lengths: int [N], tokens of each row.
        bytes_per_token: of the columns that are made.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    tokens = min(max(total // SLICES, LEAST_TOKENS), MOST_TOKENS, max(1, MOST_BYTES // bytes_per_token))
    # a slice ends behind the first row with which it has that many tokens
    cuts = np.searchsorted(ends, np.arange(tokens, total + 1, tokens)) + 1
    bounds = np.unique(np.concatenate([[0], cuts, [len(ends)]])).tolist()
    return tuple(RowSlice(index, first, stop - first) for index, (first, stop) in enumerate(pairwise(bounds)))

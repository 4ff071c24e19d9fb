"""Rows as flat columns: what the cache reads and the collators write from.

Axes: N rows, T tokens of all N rows one after the other.

Always true:
- row n owns the tokens `offsets[n]:offsets[n + 1]` of every per-token column;
- `tokens` holds at least `input_ids` (int32) and `loss_mask` (uint8, 0 or 1);
- a column of several numbers a token is never joined: `wide` holds one array per row, so that what is a thousand
  times as large as the tokens is copied once, into the shard;
- arrays may be read-only views of a memory-mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class WideRows:
    """A column of several numbers a token.

    Attributes:
        dtype: of its numbers.
        shape: of one token's value.
        pieces: N arrays [tokens of the row, *shape].
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    pieces: Sequence[Array]


@dataclass(frozen=True)
class RowBatch:
    """N rows of a cache entry.

    Attributes:
        row_ids: int64 [N], position of each row in the entry (or mixture).
        offsets: int64 [N + 1], token offsets.
        tokens: name -> [T], per-token columns.
        rows: name -> [N, *shape], per-row columns (`source_row`, rewards, ...).
        wide: name -> N arrays, per-token columns of more than one number.
    """

    row_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    tokens: Mapping[str, Array]
    rows: Mapping[str, Array] = field(default_factory=dict)
    wide: Mapping[str, WideRows] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_ids)

    def cell(self, name: str) -> tuple[np.dtype[np.generic], tuple[int, ...]] | None:
        """Type and shape of one token's value; None: no per-token column."""
        if name in self.wide:
            return self.wide[name].dtype, self.wide[name].shape
        return (self.tokens[name].dtype, ()) if name in self.tokens else None

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [N], tokens per row."""
        return np.diff(self.offsets)


@dataclass(frozen=True, eq=False)
class AddedColumns:
    """Holds what was computed for the tokens of a `RowBatch`.

    Attributes:
        columns: name -> [T, *shape].
        facts: numbers that are added up over batches.
    """

    columns: Mapping[str, Array]
    facts: Mapping[str, float]

"""Rows as flat columns: what the cache reads and the collators write from.

Axes: N rows, T tokens of all N rows one after the other.

Always true:
- row n owns the tokens `offsets[n]:offsets[n + 1]` of every per-token column;
- `tokens` holds at least `input_ids` (int32) and `loss_mask` (uint8, 0 or 1);
- arrays may be read-only views of a memory-mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class RowBatch:
    """N rows of a cache entry.

    Attributes:
        row_ids: int64 [N], position of each row in the entry (or mixture).
        offsets: int64 [N + 1], token offsets.
        tokens: name -> [T], per-token columns.
        rows: name -> [N], per-row columns (`source_row`, rewards, ...).
    """

    row_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    tokens: Mapping[str, Array]
    rows: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """int64 [N], tokens per row."""
        return np.diff(self.offsets)

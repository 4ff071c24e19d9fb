"""Bytes of shards, from lengths and column types alone: what look-ahead, `raysvc plan` and doctor count with.

Axes: R ranks.
Always true:
- the bytes of a rank are those of the arrays that `collate_mini_batch` makes for it, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raysvc.collate.columns import SEVERAL_ROWS, column_names
from raysvc.collate.geometry import Geometry
from raysvc.job.config import PlanConfig
from raysvc.ragged import Int64s
from raysvc.row_batch import Array, RowBatch

_BUILT_BYTES = {
    "input_ids": 4,
    "labels": 4,
    "position_ids": 4,
    "segment_ids": 4,
    "attention_mask": 1,
    "loss_mask": 1,
}
_ROW_BYTES = 5 * 4 + 8  # seq_lengths, row_tokens, row_group, row_group_rows, row_group_tokens; row_ids


@dataclass(frozen=True)
class ColumnBytes:
    """Bytes of what travels: per cell of the 2-D arrays, and per sequence beside its tokens."""

    per_cell: int
    per_row: int

    @classmethod
    def of(cls, some_rows: RowBatch, config: PlanConfig) -> ColumnBytes:
        """For rows that have the columns of `some_rows`.

        Raises:
            ConfigError: `plan.columns` names something that the rows do not have.
        """
        names = column_names(config.columns, some_rows, config.layout)
        cells = [_BUILT_BYTES.get(name) or _itemsize(some_rows.tokens, name) for name in names]
        rows = [_itemsize(some_rows.rows, name) for name in names if name not in some_rows.tokens]
        return cls(sum(cells), sum(rows) + _ROW_BYTES)


def bytes_by_rank(geometry: Geometry, column_bytes: ColumnBytes) -> Int64s:
    """int64 [R], bytes of each rank's shard of a mini-batch."""
    bounds = (geometry.cell_bounds, geometry.sequence_bounds, geometry.line_bounds)
    cells, sequences, lines = (np.diff(each) for each in bounds)
    nbytes: Int64s = cells * column_bytes.per_cell + sequences * column_bytes.per_row
    if geometry.layout in SEVERAL_ROWS:
        nbytes = nbytes + 4 * (sequences + lines) + 4 * (lines + 1)
    return nbytes


def _itemsize(columns: Mapping[str, Array], name: str) -> int:
    return columns[name].dtype.itemsize if name in columns else 0

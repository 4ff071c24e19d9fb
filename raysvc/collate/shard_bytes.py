"""Bytes of shards, from lengths and column types alone: what look-ahead, `raysvc plan` and doctor count with.

Axes: R ranks.
Always true:
- the bytes of a rank are those of the arrays that `collate_mini_batch` makes for it, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from raysvc.collate.columns import SEVERAL_ROWS, column_names, row_names
from raysvc.collate.flat_rows import has_trajectories
from raysvc.collate.geometry import Geometry
from raysvc.job.config import PlanConfig
from raysvc.ragged import Int64s
from raysvc.row_batch import RowBatch

_BUILT_BYTES = {
    "input_ids": 4,
    "labels": 4,
    "position_ids": 4,
    "segment_ids": 4,
    "attention_mask": 1,
    "loss_mask": 1,
    "turn_tokens": 4,
}
_ROW_BYTES = 5 * 4 + 8  # seq_lengths, row_tokens, row_group, row_group_rows, row_group_tokens; row_ids


@dataclass(frozen=True)
class ColumnBytes:
    """Bytes of what travels: per cell of the 2-D arrays, and per sequence beside its tokens."""

    per_cell: int
    per_row: int

    @classmethod
    def of(cls, some_rows: RowBatch, config: PlanConfig) -> ColumnBytes:
        """Returns the bytes of rows that have the columns of `some_rows`.

        Raises:
            ConfigError: `plan.columns` names something that the rows do not have.
        """
        names = column_names(config.columns, some_rows, config.layout)
        cells = [_BUILT_BYTES.get(name) or _cell_bytes(some_rows, name) for name in names]
        rows = [some_rows.rows[name][:1].nbytes for name in row_names(names, some_rows)]
        trajectories = 4 * has_trajectories(some_rows, config.layout)  # row_trajectory_tokens
        return cls(sum(cells), sum(rows) + _ROW_BYTES + trajectories)


def bytes_by_rank(geometry: Geometry, column_bytes: ColumnBytes, even: bool = False) -> Int64s:
    """int64 [R], bytes of each rank's shard of a mini-batch; `even`: where all ranks get the most lines of any, as wide as any."""
    bounds = (geometry.cell_bounds, geometry.sequence_bounds, geometry.line_bounds)
    cells, sequences, lines = (np.diff(each) for each in bounds)
    if even and geometry.layout not in SEVERAL_ROWS:
        cells = np.full_like(cells, lines.max() * max(width for _, width in geometry.shapes))
        sequences = np.full_like(sequences, sequences.max())
    nbytes: Int64s = cells * column_bytes.per_cell + sequences * column_bytes.per_row
    if geometry.layout in SEVERAL_ROWS:
        nbytes = nbytes + 4 * (sequences + lines) + 4 * (lines + 1)
    return nbytes


def _cell_bytes(rows: RowBatch, name: str) -> int:
    cell = rows.cell(name)
    return 0 if cell is None else cell[0].itemsize * prod(cell[1])

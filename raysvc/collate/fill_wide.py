"""Tokens into cells where a cell holds many numbers: one copy per row, straight from where its values lie.

Axes: S sequences of all ranks, C cells of all ranks, N rows.
Cells come sequence after sequence, so what lies between the end of one and the begin of the next is padding.
Always true:
- a cell holds its token's value, or the column's pad; each is written once;
- Python runs per row, never per token; a row is copied at the speed of memory.
"""

from __future__ import annotations

from raysvc.collate.columns import WideColumn
from raysvc.collate.geometry import Geometry
from raysvc.collate.shard import Array


def fill_wide(column: WideColumn, sheet: Array, geometry: Geometry) -> None:
    """Write a column into `sheet` [C, *shape], the cells of all ranks."""
    end = 0
    for row, cell, length in zip(
        geometry.rows.tolist(), geometry.cells.tolist(), geometry.lengths.tolist(), strict=True
    ):
        if row < 0:  # a dummy holds pads
            continue
        if cell > end:
            sheet[end:cell] = column.pad
        sheet[cell : cell + length] = column.pieces[row]
        end = cell + length
    sheet[end:] = column.pad

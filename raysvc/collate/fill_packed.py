"""Tokens into cells where a line holds several rows (`packed`, `stream`).

Axes: T used tokens, S sequences of all ranks, C cells of all ranks.
The cells are cut into runs: a sequence, the gap after it, the next sequence. What is constant over a run is
repeated, positions are a count that starts again, and values are gathered once per column; a gap gathers from
index T, the pad.
Always true:
- a cell holds its token's value, or the column's pad;
- positions restart at each row (`stream`: at each line) and are 0 in gaps, like segment_ids and
  attention_mask;
- no Python runs per token or per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import Column
from raysvc.collate.geometry import Geometry
from raysvc.collate.shard import Array

Int64s = npt.NDArray[np.int64]


def fill_lines(
    columns: Sequence[Column], sheets: Sequence[Array], starts: Int64s, geometry: Geometry
) -> None:
    """Write `columns` into `sheets`, the flat cells of all ranks.

    Args:
        starts: int64 [S], index of each sequence's first token; T for a dummy.
    """
    num_tokens = next((len(column.values) for column in columns if column.values is not None), 0)
    runs = np.empty((len(starts), 2), np.int64)  # cells of a sequence, cells of the gap after it
    runs[:, 0] = geometry.lengths
    runs[:, 1] = np.append(geometry.cells[1:], geometry.cell_bounds[-1]) - geometry.cells - geometry.lengths
    counts = runs.ravel()
    begins = geometry.cells - geometry.columns if geometry.layout == "stream" else geometry.cells
    sources = starts - (geometry.columns if geometry.layout == "stream" else 0)

    attention = _over(np.ones_like(starts), 0, counts, np.uint8)
    own = {column.name: sheet for column, sheet in zip(columns, sheets, strict=True)}
    cells = np.arange(int(geometry.cell_bounds[-1]), dtype=np.int32)
    positions = np.subtract(cells, _over(begins, 0, counts, np.int32), out=own.get("position_ids", cells))
    positions *= attention
    picked = _over(sources, num_tokens, counts, np.int64)
    picked += positions
    for column, sheet in zip(columns, sheets, strict=True):
        if column.values is not None:
            np.take(column.with_slack(0, 2), picked, out=sheet, mode="clip")
        elif column.name == "attention_mask":
            sheet[...] = attention
        elif column.name == "segment_ids":
            sheet[...] = _over(geometry.numbers, 0, counts, np.int32)


def _over(values: Int64s, gap: int, counts: Int64s, dtype: npt.DTypeLike) -> Array:
    """[C], each of `values` [S] over its sequence's cells, `gap` over the gaps."""
    runs = np.empty((len(values), 2), dtype)
    runs[:, 0] = values
    runs[:, 1] = gap
    return np.repeat(runs.ravel(), counts)

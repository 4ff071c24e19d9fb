"""Tokens into cells where a line holds several rows (`packed`, `stream`).

Axes: T used tokens, S sequences of all ranks, C cells of all ranks, N rows.
1. The cells are cut into runs: a sequence, the gap after it, the next sequence.
2. What is constant over a run is repeated; positions are a count that starts again.
3. Values are rows of bytes to Arrow, which puts the row of each run, or the pads of a gap, one after the other: a copy of
   memory per run, where an index per token costs several times as much.
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
from raysvc.plan.rank_plan import DUMMY, DUMMY_LENGTH
from raysvc.ragged import Int64s, offsets_of


def fill_lines(
    columns: Sequence[Column], sheets: Sequence[Array], offsets: Int64s, geometry: Geometry
) -> None:
    """Write `columns` into `sheets`, the flat cells of all ranks.

    Args:
        offsets: int64 [N + 1], index of each row's first token, and T.
    """
    ends = np.append(geometry.cells[1:], geometry.cell_bounds[-1])  # 1
    runs = np.stack([geometry.lengths, ends - geometry.cells - geometry.lengths], axis=1)
    pieces = _Pieces(offsets, runs, geometry.rows)
    begins = geometry.cells - geometry.columns if geometry.layout == "stream" else geometry.cells
    for column, sheet in zip(columns, sheets, strict=True):
        if column.values is not None:
            pieces.write(column, sheet)
        elif column.name == "attention_mask":
            sheet[...] = _over(np.ones_like(begins), runs, np.uint8)
        elif column.name == "segment_ids":
            sheet[...] = _over(geometry.numbers, runs, np.int32)
        else:
            np.subtract(np.arange(len(sheet), dtype=np.int32), _over(begins, runs, np.int32), out=sheet)
            sheet &= _over(np.full_like(begins, -1), runs, np.int8).astype(np.int32)


def _over(values: Int64s, runs: Int64s, dtype: npt.DTypeLike) -> Array:
    """[C], each of `values` [S] over its sequence's cells, 0 over the gaps."""
    pairs = np.zeros(runs.shape, dtype)
    pairs[:, 0] = values
    return np.repeat(pairs.ravel(), runs.ravel())


class _Pieces:
    """Holds what follows one another in the cells: rows, and the pads of dummies and gaps."""

    def __init__(self, offsets: Int64s, runs: Int64s, rows: Int64s) -> None:
        """`runs`: int64 [S, 2], cells of a sequence and of the gap after it; `rows`: int64 [S], DUMMY for none."""
        gaps = np.flatnonzero(runs[:, 1])
        pads = offsets_of(np.append(DUMMY_LENGTH, runs[gaps, 1]))
        self._num_pads, num_rows = int(pads[-1]), len(offsets) - 1
        self._offsets = np.append(offsets[:-1], offsets[-1] + pads)
        which = np.full(runs.shape, -1)
        which[:, 0] = np.where(rows == DUMMY, num_rows, rows)
        which[gaps, 1] = np.arange(num_rows + 1, num_rows + 1 + len(gaps))
        self._which = which[which >= 0]

    def write(self, column: Column, sheet: Array) -> None:
        """The values of `column` into `sheet` [C]."""
        import pyarrow as pa
        import pyarrow.compute as pc

        values = column.with_pads(self._num_pads)
        buffers = [None, pa.py_buffer(self._offsets * values.itemsize), pa.py_buffer(values.view(np.uint8))]
        rows = pa.Array.from_buffers(pa.large_binary(), len(self._offsets) - 1, buffers)
        made = pc.take(rows, pa.array(self._which), boundscheck=False).buffers()[2]
        sheet[...] = np.frombuffer(made, sheet.dtype, len(sheet))

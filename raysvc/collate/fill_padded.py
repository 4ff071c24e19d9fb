"""Tokens into cells where every line holds one row (`padded_right`, `padded_left`).

Axes: T used tokens, S = B lines of all ranks, W columns.
A window of the flat tokens as wide as a line is a row and what follows it, so that one indexing of windows
copies many rows at the speed of memory; a mask then keeps what belongs to the row. Lines come longest first:
bands of lines of similar length leave out most of the padding.
Always true:
- a cell holds its token's value, or the column's pad;
- a dummy's two cells hold pads, with attention 1 and positions 0 and 1;
- no Python runs per token or per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import Column
from raysvc.collate.geometry import Geometry
from raysvc.collate.shard import Array

Int64s = npt.NDArray[np.int64]

_BAND_CELLS = 65_536  # a band and its temporaries stay in a cache of 1 MB (best of 2^13 to 2^17 cells)


@dataclass(frozen=True)
class _Band:
    """Lines [start, stop) of a rank, all at most `width` tokens long."""

    rank: int
    start: int
    stop: int
    width: int


def fill_rows(columns: Sequence[Column], sheets: Sequence[Array], starts: Int64s, geometry: Geometry) -> None:
    """Write `columns` into `sheets`, the flat cells of all ranks.

    Args:
        starts: int64 [S], index of each line's first token; T for a dummy.
    """
    slack = max(width for _, width in geometry.shapes)
    sources = [None if column.values is None else column.with_slack(slack, slack) for column in columns]
    for column, sheet in zip(columns, sheets, strict=True):
        sheet.fill(column.pad)
    ranks = list(zip(*map(geometry.by_rank, sheets), strict=True))
    lengths_32 = geometry.lengths.astype(np.int32)
    for band in _bands(geometry):
        first = int(geometry.line_bounds[band.rank]) + band.start
        lines = slice(first, first + band.stop - band.start)
        lengths = lengths_32[lines, None]
        positions = np.arange(band.width, dtype=np.int32)[None]
        begins = starts[lines] + slack
        if geometry.left:
            begins += lengths[:, 0] - band.width
            positions = positions - (band.width - lengths)
        mask = positions >= 0 if geometry.left else positions < lengths
        edge = slice(-band.width, None) if geometry.left else slice(0, band.width)
        for column, sheet, source in zip(columns, ranks[band.rank], sources, strict=True):
            cells = sheet[band.start : band.stop, edge]
            if source is not None:
                shape = (len(source) - band.width + 1, band.width)
                windows = np.ndarray(shape, source.dtype, source, strides=source.strides * 2)
                np.copyto(cells, windows[begins], where=mask)
            elif column.name == "position_ids":
                np.copyto(cells, positions, where=mask)
            else:
                cells[...] = mask


def _bands(geometry: Geometry) -> Iterator[_Band]:
    """Runs of micro-batches of each rank with some `_BAND_CELLS` cells, none wider than the first one."""
    for rank, micro_batches in enumerate(geometry.micro_batches):
        start, width = 0, micro_batches[0].width
        for micro in micro_batches:
            if micro.width > width or (micro.start - start) * width >= _BAND_CELLS:
                yield _Band(rank, start, micro.start, width)
                start, width = micro.start, micro.width
        yield _Band(rank, start, micro_batches[-1].stop, width)

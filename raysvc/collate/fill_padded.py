"""Tokens into cells where every line holds one row (`padded_right`, `padded_left`).

Axes: T used tokens, S = B lines of all ranks, W columns.
A window of the flat tokens as wide as a line is a row and what follows it, so that one indexing of windows
copies many rows at the speed of memory. What follows is cut off with bits, which costs a third of what numpy's
masked copies do: values are taken as what differs from the pad, and bits of 0 make them the pad. Lines come longest
first: bands of lines of similar length leave out most of the padding.
Always true:
- a cell holds its token's value, or the column's pad;
- a dummy's two cells hold pads, with attention 1 and positions 0 and 1;
- no Python runs per token or per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.collate.columns import Column, bits_of
from raysvc.collate.geometry import Geometry
from raysvc.collate.shard import Array

Int64s = npt.NDArray[np.int64]

_BAND_CELLS = 131_072  # of 2^13 to 2^18 the best, with two columns and with four


@dataclass(frozen=True)
class _Band:
    """Lines [start, stop) of a rank, all at most `width` tokens long."""

    rank: int
    start: int
    stop: int
    width: int


def fill_rows(
    columns: Sequence[Column], sheets: Sequence[Array], offsets: Int64s, geometry: Geometry
) -> None:
    """Write `columns` into `sheets`, the flat cells of all ranks.

    Args:
        offsets: int64 [N + 1], index of each row's first token, and T.
    """
    num_tokens, rim = int(offsets[-1]), max(width for _, width in geometry.shapes)
    begins_S = offsets[geometry.rows]  # DUMMY is the last one
    if geometry.left:
        begins_S += geometry.lengths
    sources = [None if column.values is None else _Source.of(column, rim) for column in columns]
    pads = [column.pad_bits for column in columns]
    ranks = list(zip(*(geometry.by_rank(sheet.view(bits_of(sheet.dtype))) for sheet in sheets), strict=True))
    runs = RowMask.runs_of(len(begins_S), geometry.left)
    for band in _bands(geometry):
        width, first = band.width, int(geometry.line_bounds[band.rank])
        lines = slice(first + band.start, first + band.stop)
        begins = begins_S[lines] - width if geometry.left else begins_S[lines]
        windows = _Windows(begins, width, num_tokens, rim)
        inside = RowMask(geometry.lengths[lines], width, geometry.left, runs)
        edge, beside = slice(0, width), slice(width, None)
        if geometry.left:
            edge, beside = slice(-width, None), slice(0, -width)
        for column, sheet, source, pad in zip(columns, ranks[band.rank], sources, pads, strict=True):
            cells = sheet[band.start : band.stop, edge]
            if width < sheet.shape[1]:
                sheet[band.start : band.stop, beside] = pad
            if source is not None:
                values = windows.of(source)
                if pad:
                    values ^= pad
                np.bitwise_and(values, inside.bits(values.dtype), out=cells)
                if pad:
                    cells ^= pad
            elif column.name == "position_ids":
                np.bitwise_and(inside.positions(), inside.bits(cells.dtype), out=cells)
            else:
                np.bitwise_and(inside.bits(cells.dtype), cells.dtype.type(1), out=cells)


class _Source(NamedTuple):
    """A column's bits, unsigned.

    Attributes:
        values: [T].
        rim: what windows over begin or end see: pads, the first values, the last values, pads.
    """

    values: Array
    rim: Array

    @classmethod
    def of(cls, column: Column, rim: int) -> _Source:
        assert column.values is not None
        values = column.values.astype(column.dtype, copy=False).view(bits_of(column.dtype))
        near, pads = min(rim, len(values)), np.full(rim, column.pad_bits)
        return cls(values, np.concatenate([pads, values[:near], values[len(values) - near :], pads]))


class _Windows:
    """Windows of a band's lines over the values of any column."""

    def __init__(self, begins: Int64s, width: int, num_tokens: int, rim: int) -> None:
        """`begins`: int64 [n], index of each window's first value; `rim`: the widest window."""
        last, near = num_tokens - width, min(rim, num_tokens)
        self._width = width
        self._begins: Int64s | None = begins  # None: all reach beyond the values
        self._over: Int64s | None = None  # windows that do; None: none
        if begins.min() < 0 or begins.max() > last:
            self._over = np.flatnonzero((begins < 0) | (begins > last))
            over = begins[self._over]
            self._in_rim = over + np.where(over > last, rim + 2 * near - num_tokens, rim)
            self._begins = np.clip(begins, 0, last) if len(over) < len(begins) else None

    def of(self, source: _Source) -> Array:
        """Unsigned [n, width], a copy."""
        values, rim = (self._all(part) for part in source)
        if self._over is None:
            return values[self._begins]
        if self._begins is None:
            return rim[self._in_rim]
        out = values[self._begins]
        out[self._over] = rim[self._in_rim]
        return out

    def _all(self, values: Array) -> Array:
        """[len - width + 1, width], a view."""
        shape = max(0, len(values) - self._width + 1), self._width
        return np.ndarray(shape, values.dtype, values, strides=values.strides * 2)


class RowMask:
    """Says which cells of n lines, `width` cells each, hold a row."""

    def __init__(
        self, lengths: Int64s, width: int, left: bool, runs: npt.NDArray[np.int8] | None = None
    ) -> None:
        """Over the last (`left`: else the first) `lengths` [n] cells of each line; `runs`: of `runs_of` n or more lines."""
        self._lengths, self._width, self._left = lengths, width, left
        self._counts = np.empty((len(lengths), 2), np.int64)
        self._counts[:, int(left)] = lengths
        np.subtract(width, lengths, out=self._counts[:, int(not left)])
        runs = self.runs_of(len(lengths), left) if runs is None else runs[: self._counts.size]
        self._bytes = np.repeat(runs, self._counts.ravel()).reshape(len(lengths), width)
        self._wider: dict[int, Array] = {1: self._bytes.view(np.uint8)}

    @staticmethod
    def runs_of(num_lines: int, left: bool) -> npt.NDArray[np.int8]:
        """int8 [2 n], -1 for a row and 0 for what is beside it, line after line."""
        return np.tile(np.array([0, -1] if left else [-1, 0], np.int8), num_lines)

    def bits(self, dtype: np.dtype[Any]) -> Array:
        """Unsigned [n, width], as long as numbers of `dtype`: all bits 1 in a row, all 0 elsewhere."""
        wider = self._wider.get(dtype.itemsize)
        if wider is None:  # the sign fills a longer number; made once for all columns
            signed = self._bytes.astype(f"i{dtype.itemsize}")
            wider = self._wider[dtype.itemsize] = signed.view(bits_of(dtype))
        return wider

    def spread(self, values: Array) -> Array:
        """[n, width] with each of `values` [n] over its row, zeros elsewhere."""
        pairs = np.zeros(self._counts.shape, values.dtype)
        pairs[:, int(self._left)] = values
        return np.repeat(pairs.ravel(), self._counts.ravel()).reshape(self._bytes.shape)

    def positions(self) -> npt.NDArray[np.uint32]:
        """uint32 [n, width], number of each token in its row; anything elsewhere."""
        cells = np.arange(self._width, dtype=np.int32)[None]
        if self._left:
            cells = cells - (self._width - self._lengths[:, None]).astype(np.int32)
        return cells.view(np.uint32)


def _bands(geometry: Geometry) -> Iterator[_Band]:
    """Runs of micro-batches of each rank with some `_BAND_CELLS` cells, none wider than the first one."""
    for rank, micro_batches in enumerate(geometry.micro_batches):
        start, width = 0, micro_batches[0].width
        for micro in micro_batches:
            if micro.width > width or (micro.start - start) * width >= _BAND_CELLS:
                yield _Band(rank, start, micro.start, width)
                start, width = micro.start, micro.width
        yield _Band(rank, start, micro_batches[-1].stop, width)

"""Lists the arrays of a cell per token that travel, with their values and padding.

Axes: N rows, T used tokens, S sequences.
Always true:
- a column of one number a token is flat, [T]; one of several is `WideColumn`, a piece per row;
- `labels` is -100 and `loss_mask` 0 at the first token of a row, and they agree everywhere;
- cells of padding: the pad value, attention_mask 0, position_ids 0, segment_ids 0, labels -100, loss_mask 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.collate.flat_rows import FlatRows, has_turns
from raysvc.collate.shard import Array
from raysvc.errors import ConfigError
from raysvc.job.column_dtypes import BF16, scalar_of
from raysvc.row_batch import RowBatch

IGNORED = -100
SEVERAL_ROWS = ("packed", "stream")  # layouts with several rows on a line
_BUILT = ("attention_mask", "labels", "position_ids", "segment_ids")


@dataclass(frozen=True, eq=False)
class Column:
    """One 2-D array to be.

    Attributes:
        name: of the array.
        dtype: of its cells.
        pad: in every cell without a token, and in the cells of dummies.
        values: [T], one value per token; None: it follows from where the tokens lie (`attention_mask`,
            `position_ids`, `segment_ids`; a dummy has them like a row).
    """

    name: str
    dtype: np.dtype[np.generic]
    pad: float | int
    values: Array | None = None

    def with_pads(self, count: int) -> Array:
        """[T + count], the values and pads after them."""
        assert self.values is not None
        out = np.empty(len(self.values) + count, self.dtype)
        out[: len(self.values)] = self.values
        out[len(self.values) :] = self.pad
        return out

    @property
    def pad_bits(self) -> np.unsignedinteger[Any]:
        """[], the bits of the pad."""
        bits: np.unsignedinteger[Any] = np.full(1, self.pad, self.dtype).view(bits_of(self.dtype))[0]
        return bits


def bits_of(dtype: np.dtype[Any]) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integers as long as numbers of `dtype`."""
    return np.dtype(f"u{dtype.itemsize}")


@dataclass(frozen=True, eq=False)
class WideColumn:
    """One [B, W, *shape] array to be, where a cell holds several numbers.

    Attributes:
        name: of the array.
        dtype: of its numbers.
        shape: of a cell.
        pad: in every cell without a token, and in the cells of dummies; [].
        pieces: N arrays [used tokens of the row, *shape].
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    pad: Any
    pieces: Sequence[Array]


def column_names(names: Sequence[str], rows: RowBatch, layout: str) -> tuple[str, ...]:
    """`names` once each, with `segment_ids` where several rows share a line, and `turn_tokens` where a row holds several turns.

    Raises:
        ConfigError: one that the rows do not have.
    """
    for name in names:
        if name not in _BUILT and not any(name in there for there in (rows.tokens, rows.rows, rows.wide)):
            known = ", ".join(sorted({*rows.tokens, *rows.rows, *rows.wide, *_BUILT}))
            raise ConfigError("plan.columns", f"the rows have no {name!r}", f"use some of: {known}")
    extra = ["segment_ids"] if layout in SEVERAL_ROWS else []
    extra += ["turn_tokens"] if has_turns(rows) else []
    return tuple(dict.fromkeys([*names, *extra]))


def columns_of(source: FlatRows, names: Sequence[str], pads: Mapping[str, float | int]) -> list[Column]:
    """The arrays of one number a token among `names`."""
    return [
        _column(source, name, pads.get(name, 0))
        for name in names
        if name in _BUILT or name in source.rows.tokens or name == "turn_tokens"
    ]


def wide_columns_of(
    source: FlatRows, names: Sequence[str], pads: Mapping[str, float | int]
) -> list[WideColumn]:
    """The arrays of several numbers a token among `names`."""
    wide = {name: source.rows.wide[name] for name in names if name in source.rows.wide}
    return [
        WideColumn(name, its.dtype, its.shape, scalar_of(pads.get(name, 0), its.dtype), source.pieces(name))
        for name, its in wide.items()
    ]


def row_names(names: Sequence[str], rows: RowBatch) -> list[str]:
    """The per-row arrays among `names`."""
    others = {*rows.tokens, *rows.wide, *_BUILT}
    return [name for name in names if name in rows.rows and name not in others]


def _column(source: FlatRows, name: str, pad: float | int) -> Column:
    int32, uint8 = np.dtype(np.int32), np.dtype(np.uint8)
    if name == "input_ids":
        return Column(name, int32, pad, source.tokens(name))
    if name == "labels":
        return Column(name, int32, IGNORED, _labels(source))
    if name == "loss_mask":
        return Column(name, uint8, 0, source.trained)
    if name == "attention_mask":
        return Column(name, uint8, 0)
    if name == "turn_tokens":
        return Column(name, int32, 0, source.turn_tokens)
    if name in _BUILT:
        return Column(name, int32, 0)
    values = source.tokens(name)
    return Column(name, values.dtype, scalar_of(pad, BF16) if values.dtype == BF16 else pad, values)


def _labels(source: FlatRows) -> npt.NDArray[np.int32]:
    """int32 [T], ids of targets, and IGNORED; bits in place of a branch per token."""
    targets = np.negative(source.trained.view(np.int8)).astype(np.int32)  # all bits 1, or 0
    labels = source.tokens("input_ids").astype(np.int32) ^ np.int32(IGNORED)
    labels &= targets
    labels ^= np.int32(IGNORED)
    return labels

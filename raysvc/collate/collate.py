"""Rows into the arrays of each rank.

Axes: N rows of the mini-batch, T their tokens, S sequences of all ranks, B lines, W columns of a rank.
Always true:
- every used token of every real row is in exactly one cell of one rank;
- a dummy is two tokens `pad_token_id` with attention, without labels, counted in no denominator;
- no Python runs per token or per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from raysvc.collate.columns import SEVERAL_ROWS, Column, column_names, columns_of, row_names
from raysvc.collate.fill_packed import fill_lines
from raysvc.collate.fill_padded import fill_rows
from raysvc.collate.flat_rows import Source
from raysvc.collate.geometry import Frame, frame_of
from raysvc.collate.shard import Array, Shard
from raysvc.config import Layout
from raysvc.plan.plan import MiniBatchPlan
from raysvc.row_batch import RowBatch

_LINE = 64  # bytes; every column begins at a multiple of it


def collate_mini_batch(
    rows: RowBatch,
    mini: MiniBatchPlan,
    *,
    step: int,
    mini_index: int,
    layout: Layout,
    pad_token_id: int,
    columns: Sequence[str],
    pad_to_multiple: int = 1,
    align: int = 1,
    pad_values: Mapping[str, float | int] | None = None,
) -> tuple[Shard, ...]:
    """One shard per rank of `mini`.

    Args:
        rows: the rows of `mini.row_ids`, in that order.
        mini: which row goes where.
        step: index of the step.
        mini_index: number of the mini-batch in the step.
        layout: of the arrays.
        pad_token_id: fills `input_ids`.
        columns: which 2-D arrays and extra columns travel; lines of several rows always bring `segment_ids`.
        pad_to_multiple: widths are rounded up to this.
        align: packed sequences begin at multiples of this.
        pad_values: column -> value of padding and dummies, for extra columns; default 0.

    Raises:
        ConfigError: `columns` names something that the rows do not have.
    """
    source = Source(rows, mini, layout)
    frame = frame_of(mini.ranks, mini.lengths, layout, pad_to_multiple, align)
    names = column_names(columns, rows, layout)
    pads = {"input_ids": pad_token_id, **(pad_values or {})}
    sheets = _sheets(columns_of(source, names, pads), source, frame)
    per_row = _per_row(source, frame, names, pads)
    row_ids = np.append(mini.row_ids, -1)[frame.rows]
    shards = []
    for rank in range(len(mini.ranks)):
        here = slice(int(frame.sequence_bounds[rank]), int(frame.sequence_bounds[rank + 1]))
        arrays = {name: sheet[rank] for name, sheet in sheets.items()}
        arrays |= {name: values[here] for name, values in per_row.items()}
        if layout in SEVERAL_ROWS:
            arrays |= _boundaries(frame, rank)
        shards.append(
            Shard(
                step, mini_index, rank, layout, arrays, row_ids[here], source.denominators,
                frame.micro_batches[rank],
            )
        )  # fmt: skip
    return tuple(shards)


def _sheets(columns: Sequence[Column], source: Source, frame: Frame) -> dict[str, list[Array]]:
    """name -> one [B, W] array per rank, all of them in one block that malloc can hand out again."""
    num_cells = int(frame.cell_bounds[-1])
    sizes = [-(-num_cells * column.dtype.itemsize // _LINE) * _LINE for column in columns]
    block = np.empty(sum(sizes), np.uint8)
    flat = [
        block[stop - size : stop - size + num_cells * column.dtype.itemsize].view(column.dtype)
        for column, size, stop in zip(columns, sizes, accumulate(sizes), strict=True)
    ]
    starts = np.append(source.firsts, len(source.trained))[frame.rows]
    fill = fill_lines if frame.layout in SEVERAL_ROWS else fill_rows
    fill(columns, flat, starts, frame)
    bounds = list(pairwise(frame.cell_bounds.tolist()))
    return {
        column.name: [cells[a:b].reshape(frame.shape(rank)) for rank, (a, b) in enumerate(bounds)]
        for column, cells in zip(columns, flat, strict=True)
    }


def _per_row(
    source: Source, frame: Frame, names: Sequence[str], pads: Mapping[str, float | int]
) -> dict[str, Array]:
    """name -> [S], the per-row arrays of all ranks."""
    own: dict[str, Array] = {
        "seq_lengths": frame.lengths.astype(np.int32),
        "row_tokens": _dealt(source.row_tokens, frame, 0),
        "row_group": _dealt(source.mini.group_index, frame, -1),
        "row_group_rows": _dealt(source.group_rows, frame, 0),
    }
    rows = source.rows.rows
    return own | {
        name: _dealt(rows[name], frame, pads.get(name, 0)) for name in row_names(names, source.rows)
    }


def _dealt(values: Array, frame: Frame, pad: float | int) -> Array:
    return np.append(values, np.array([pad], values.dtype))[frame.rows]


def _boundaries(frame: Frame, rank: int) -> dict[str, Array]:
    first, last = int(frame.line_bounds[rank]), int(frame.line_bounds[rank + 1])
    offsets = frame.line_starts[first : last + 1] + np.arange(first, last + 1)
    return {
        "cu_seqlens": frame.bounds[offsets[0] : offsets[-1]],
        "cu_seqlens_offsets": (offsets - offsets[0]).astype(np.int32),
    }

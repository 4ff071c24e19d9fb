"""Rows into the arrays of each rank.

Axes: N rows of the mini-batch, T their tokens, S sequences of all ranks, B lines, W columns of a rank.
Always true:
- every used token of every real row is in exactly one cell of one rank;
- a dummy is two tokens `pad_token_id` with attention, without labels, counted in no denominator;
- no Python runs per token; none per row but where a cell holds many numbers: such a row is copied at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Protocol

import numpy as np

from raysvc.collate.columns import (
    SEVERAL_ROWS,
    Column,
    WideColumn,
    column_names,
    columns_of,
    row_names,
    wide_columns_of,
)
from raysvc.collate.fill_packed import fill_lines
from raysvc.collate.fill_padded import fill_rows
from raysvc.collate.flat_rows import FlatRows, has_trajectories
from raysvc.collate.geometry import Geometry, geometry_of
from raysvc.collate.reused_memory import MEMORY
from raysvc.collate.shard import Array, Shard
from raysvc.job.column_dtypes import scalar_of
from raysvc.job.config import Layout
from raysvc.plan.plan import MiniBatchPlan
from raysvc.row_batch import RowBatch

_LINE = 64  # bytes; every column begins at a multiple of it


@dataclass(frozen=True)
class CollateSpec:
    """Says which shards the rows of a mini-batch become.

    Attributes:
        step: index of the step.
        mini_index: number of the mini-batch in the step.
        layout: of the arrays.
        pad_token_id: fills `input_ids`.
        columns: which 2-D arrays and extra columns travel; lines of several rows always bring `segment_ids`.
        pad_to_multiple: widths are rounded up to this.
        align: packed sequences begin at multiples of this.
        pad_values: column -> value of padding and dummies, for extra columns; default 0.
    """

    step: int
    mini_index: int
    layout: Layout
    pad_token_id: int
    columns: Sequence[str]
    pad_to_multiple: int = 1
    align: int = 1
    pad_values: Mapping[str, float | int] | None = None


class Collate(Protocol):
    """Makes the shards of a role its own way. Hashable, and pickled with the role."""

    def collate(self, rows: RowBatch, mini: MiniBatchPlan, spec: CollateSpec) -> tuple[Shard, ...]:
        """Does what `collate_mini_batch` does; `Shard.to_wire` is what a ref holds."""


def collate_mini_batch(rows: RowBatch, mini: MiniBatchPlan, spec: CollateSpec) -> tuple[Shard, ...]:
    """One shard per rank of `mini`.

    Args:
        rows: the rows of `mini.row_ids`, in that order.
        mini: which row goes where.
        spec: what they become.

    Raises:
        ConfigError: `spec.columns` names something that the rows do not have.
    """
    layout = spec.layout
    source = FlatRows(rows, mini, layout)
    geometry = geometry_of(mini.ranks, mini.lengths, layout, spec.pad_to_multiple, spec.align)
    names = column_names(spec.columns, rows, layout)
    pads = {"input_ids": spec.pad_token_id, **(spec.pad_values or {})}
    wide = wide_columns_of(source, names, pads)
    sheets = _sheets(columns_of(source, names, pads), wide, source, geometry)
    per_row = _per_row(source, geometry, names, pads)
    vectors = tuple(name for name, values in per_row.items() if values.ndim > 1)
    row_ids = np.append(mini.row_ids, -1)[geometry.rows]
    shards = []
    for rank in range(len(mini.ranks)):
        here = slice(int(geometry.sequence_bounds[rank]), int(geometry.sequence_bounds[rank + 1]))
        arrays = {name: sheet[rank] for name, sheet in sheets.items()}
        arrays |= {name: values[here] for name, values in per_row.items()}
        if layout in SEVERAL_ROWS:
            arrays |= _boundaries(geometry, rank)
        shards.append(
            Shard(
                spec.step, spec.mini_index, rank, layout, arrays, row_ids[here], source.denominators,
                geometry.micro_batches[rank], vectors, spec.pad_token_id,
            )
        )  # fmt: skip
    return tuple(shards)


def _sheets(
    columns: Sequence[Column], wide: Sequence[WideColumn], source: FlatRows, geometry: Geometry
) -> dict[str, list[Array]]:
    """name -> one [B, W, *shape] array per rank, all of them in one block that is used again."""
    num_cells = int(geometry.cell_bounds[-1])
    shapes = [(num_cells,)] * len(columns) + [(num_cells, *column.shape) for column in wide]
    every: list[Column | WideColumn] = [*columns, *wide]
    dtypes = [column.dtype for column in every]
    counts = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    sizes = [-(-count // _LINE) * _LINE for count in counts]
    block = MEMORY.take(sum(sizes))
    flat = [
        block[stop - size : stop - size + count].view(dtype).reshape(shape)
        for shape, dtype, count, size, stop in zip(shapes, dtypes, counts, sizes, accumulate(sizes), strict=True)
    ]  # fmt: skip
    fill = fill_lines if geometry.layout in SEVERAL_ROWS else fill_rows
    fill(columns, flat[: len(columns)], source.offsets, geometry)
    for one, sheet in zip(wide, flat[len(columns) :], strict=True):
        fill_wide(one, sheet, geometry)
    return {column.name: geometry.by_rank(cells) for column, cells in zip(every, flat, strict=True)}


def _per_row(
    source: FlatRows, geometry: Geometry, names: Sequence[str], pads: Mapping[str, float | int]
) -> dict[str, Array]:
    """name -> [S, *shape], the per-row arrays of all ranks."""
    own: dict[str, Array] = {
        "seq_lengths": geometry.lengths.astype(np.int32),
        "row_tokens": _dealt(source.row_tokens, geometry, 0),
        "row_group": _dealt(source.mini.group_index, geometry, -1),
        "row_group_rows": _dealt(source.group_rows, geometry, 0),
        "row_group_tokens": _dealt(source.group_tokens, geometry, 0),
    }
    if has_trajectories(source.rows, geometry.layout):
        own["row_trajectory_tokens"] = _dealt(source.trajectory_tokens, geometry, 0)
    rows = source.rows.rows
    return own | {
        name: _dealt(rows[name], geometry, pads.get(name, 0)) for name in row_names(names, source.rows)
    }


def _dealt(values: Array, geometry: Geometry, pad: float | int) -> Array:
    """[S, *shape], the values [N, *shape] of each sequence's row; `pad` for a dummy."""
    if not len(geometry.dummies):
        return values[geometry.rows]
    last = np.full((1, *values.shape[1:]), scalar_of(pad, values.dtype), values.dtype)
    return np.concatenate([values, last])[geometry.rows]


def _boundaries(geometry: Geometry, rank: int) -> dict[str, Array]:
    first, last = int(geometry.line_bounds[rank]), int(geometry.line_bounds[rank + 1])
    offsets = geometry.line_starts[first : last + 1] + np.arange(first, last + 1)
    return {
        "cu_seqlens": geometry.bounds[offsets[0] : offsets[-1]],
        "cu_seqlens_offsets": (offsets - offsets[0]).astype(np.int32),
    }


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

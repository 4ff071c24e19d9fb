"""Rows of groups: in which table they lie, and how they become one batch. No lock, no disk but through `read`.

Axes: N sequences of a step, T their tokens.
Always true:
- a group's rows are its pieces in the order of their numbers, whole: no gap and none twice;
- a table that left memory is read again when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.actors.rollouts.group_log import Folder
from raysvc.errors import SourceError
from raysvc.rl.group_table import values_of
from raysvc.row_batch import RowBatch, WideRows

Ints = npt.NDArray[np.int64]


@dataclass(eq=False)
class Chunk:
    """A table that was put, in memory or in a file.

    Attributes:
        folder: of the file.
        num_rows: of this table.
        table: None: it left memory.
        name: of the file; None: not written yet.
        start: its first row in the file.
        num_groups: that need it.
        num_through: of them, those that were trained or never will be.
    """

    folder: Folder
    num_rows: int
    table: pa.Table | None = None
    name: str | None = None
    start: int = 0
    num_groups: int = 0
    num_through: int = 0


Read = Callable[[Chunk], pa.Table]


@dataclass(frozen=True, eq=False)
class ChunkPiece:
    """Rows [start, stop) of a chunk, that are rows `first` on of their group and have the ids `row_id` on."""

    chunk: Chunk
    start: int
    stop: int
    first: int
    row_id: int
    lengths: npt.NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        """Sequences."""
        return self.stop - self.start

    def after(self, known: int) -> ChunkPiece:
        """Without the rows below `known`."""
        cut = known - self.first
        return (
            self
            if cut <= 0
            else ChunkPiece(
                self.chunk, self.start + cut, self.stop, known, self.row_id + cut, self.lengths[cut:]
            )
        )


@dataclass(eq=False)
class GroupRows:
    """Holds what is known of a group.

    Attributes:
        pieces: its rows.
        closed: no rows will follow.
        late: late column -> row -> where its value is.
    """

    pieces: list[ChunkPiece] = field(default_factory=list)
    closed: bool = False
    late: dict[str, dict[int, tuple[Chunk, int]]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Sequences."""
        return sum(piece.num_rows for piece in self.pieces)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence."""
        return np.concatenate([piece.lengths for piece in self.pieces])

    @property
    def row_ids(self) -> Ints:
        """The id of each sequence."""
        return np.concatenate([np.arange(p.row_id, p.row_id + p.num_rows) for p in self.pieces])

    @property
    def chunks(self) -> set[Chunk]:
        """All tables that it needs."""
        late = {chunk for rows in self.late.values() for chunk, _ in rows.values()}
        return {piece.chunk for piece in self.pieces} | late

    def is_complete(self, late: Sequence[str]) -> bool:
        """Tells whether it may be trained: closed, and every late column has all rows."""
        count = self.num_rows
        have = {
            name.removeprefix("token.").removeprefix("row."): len(rows) for name, rows in self.late.items()
        }
        return self.closed and all(have.get(name, 0) == count for name in late)

    def table(self, read: Read) -> pa.Table:
        """All rows with all columns."""
        parts = [read(piece.chunk).slice(piece.start, piece.num_rows) for piece in self.pieces]
        whole = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        for name in sorted(self.late):
            whole = whole.append_column(name, self._late_column(name, read))
        return whole

    def _late_column(self, name: str, read: Read) -> pa.ChunkedArray:
        rows = self.late[name]
        found = [rows[number] for number in range(len(rows))]
        return pa.chunked_array([read(chunk).column(name).slice(at, 1).chunk(0) for chunk, at in found])


def refuse_without(table: pa.Table, name: str) -> None:
    """Refuse a put that lacks the per-row column that groups are filtered by.

    Raises:
        SourceError: names its first group.
    """
    if f"row.{name}" not in table.column_names:
        what = f"has no {name!r}, which drop_constant names"
        raise SourceError(f"group {table.column('uid')[0].as_py()!r}", what, "put it with each group")


def is_constant(table: pa.Table, name: str) -> bool:
    """Tells whether all trajectories of a group, by their last rows, have one value of a per-row column."""
    values = values_of(table.column(f"row.{name}").combine_chunks())
    if "row.trajectory" in table.column_names:
        numbers = table.column("row.trajectory").to_numpy()[::-1]
        values = values[::-1][np.unique(numbers, return_index=True)[1]]
    return bool((values == values[0]).all())


def batch_of(table: pa.Table, row_ids: Ints) -> RowBatch:
    """Flat columns of a table; those of several numbers a token stay a piece per row."""
    tokens, rows = {}, {"weight_version": table.column("weight_version").to_numpy()}
    wide: dict[str, WideRows] = {}
    offsets = np.zeros(len(row_ids) + 1, np.int64)
    for name in table.column_names:
        if name in ("input_ids", "loss_mask") or name.startswith("token."):
            column = table.column(name)
            offsets[1:] = np.cumsum(pc.list_value_length(column).to_numpy())
            bare = name.removeprefix("token.")
            if pa.types.is_fixed_size_list(column.type.value_type):
                wide[bare] = _pieces(column)
            else:
                tokens[bare] = values_of(pa.chunked_array(pc.list_flatten(column)).combine_chunks())
        elif name.startswith("row."):
            rows[name.removeprefix("row.")] = values_of(table.column(name).combine_chunks())
    return RowBatch(row_ids, offsets, tokens, rows, wide)


def _pieces(column: pa.ChunkedArray) -> WideRows:
    """Views of the values of each row, chunk by chunk: nothing is joined."""
    pieces: list[npt.NDArray[Any]] = []
    for chunk in column.chunks:
        values, bounds = values_of(chunk.values), chunk.offsets.to_numpy().tolist()
        pieces += [values[start:stop] for start, stop in pairwise(bounds)]
    if not pieces:
        empty = values_of(pa.array([], column.type.value_type))
        return WideRows(empty.dtype, empty.shape[1:], ())
    return WideRows(pieces[0].dtype, pieces[0].shape[1:], pieces)


def without_targets(batch: RowBatch, rows_N: npt.NDArray[np.bool_]) -> RowBatch:
    """The batch with a loss mask of zeros in these rows."""
    mask = np.where(np.repeat(rows_N, batch.lengths), 0, batch.tokens["loss_mask"]).astype(np.uint8)
    return replace(batch, tokens={**batch.tokens, "loss_mask": mask})


def taken(batch: RowBatch, row_ids: Ints) -> RowBatch:
    """The rows with these ids, in their order."""
    order = np.argsort(batch.row_ids, kind="stable")
    at = order[np.searchsorted(batch.row_ids, row_ids, sorter=order)]
    lengths = batch.lengths[at]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    cells = np.arange(int(offsets[-1])) + np.repeat(batch.offsets[at] - offsets[:-1], lengths)
    tokens = {name: values[cells] for name, values in batch.tokens.items()}
    wide = {
        name: replace(its, pieces=[its.pieces[row] for row in at.tolist()])
        for name, its in batch.wide.items()
    }
    rows = {name: values[at] for name, values in batch.rows.items()}
    return RowBatch(row_ids, offsets, tokens, rows, wide)

"""Numbers per row and per token, in row order: what workers give back, and columns that a driver adds to shards.

Axes: N rows, T their tokens one after the other, B lines, W columns, S sequences of a rank.
Always true:
- what goes into a shard at a row's tokens comes out at the same tokens, in any layout;
- dummies are in no result; `in_order` puts row n where `row_ids[n]` of the mini-batch is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raysvc.collate.shard import Array, Shard
from raysvc.errors import ConfigError
from raysvc.ragged import Int64s, cells_of_runs, offsets_of


@dataclass(frozen=True, eq=False)
class RowValues:
    """Values of some rows.

    Attributes:
        row_ids: int64 [N].
        lengths: int64 [N], tokens of each row.
        tokens: name -> [T].
        rows: name -> [N].
    """

    row_ids: Int64s
    lengths: Int64s
    tokens: Mapping[str, Array] = field(default_factory=dict)
    rows: Mapping[str, Array] = field(default_factory=dict)

    @property
    def starts(self) -> Int64s:
        """int64 [N], where each row begins in T."""
        return offsets_of(self.lengths)[:-1]

    def row(self, index: int, name: str) -> Array:
        """The values of one row's tokens."""
        start = int(self.starts[index])
        return self.tokens[name][start : start + int(self.lengths[index])]

    def pick(self, index: Int64s) -> RowValues:
        """The rows at `index`, in that order."""
        lengths = self.lengths[index]
        cells = cells_of_runs(self.starts[index], lengths)
        return RowValues(
            self.row_ids[index],
            lengths,
            {name: values[cells] for name, values in self.tokens.items()},
            {name: values[index] for name, values in self.rows.items()},
        )

    def renamed(self, **names: str) -> RowValues:
        """The per-token columns `new=old`, and no others."""
        return replace(self, tokens={new: self.tokens[old] for new, old in names.items()}, rows={})


def cells_of(shard: Shard) -> Int64s:
    """int64 [S], the cell (line * W + column) of each sequence's first token."""
    lines, width = shard.arrays["input_ids"].shape
    lengths = shard.arrays["seq_lengths"].astype(np.int64)
    if "cu_seqlens_offsets" not in shard.arrays:
        first = width - lengths if shard.layout == "padded_left" else np.zeros(lines, np.int64)
        return np.asarray(np.arange(lines) * width + first, np.int64)
    offsets = shard.arrays["cu_seqlens_offsets"].astype(np.int64)
    begins = np.ones(int(offsets[-1]), bool)
    begins[offsets[1:] - 1] = False  # the end of a line's last row begins none
    line = np.repeat(np.arange(lines), np.diff(offsets) - 1)
    return np.asarray(line * width + shard.arrays["cu_seqlens"].astype(np.int64)[begins], np.int64)


def gather_rows(shard: Shard, sheets: Mapping[str, Array]) -> RowValues:
    """The values of [B, W] sheets at the tokens of the shard's real rows, in the order of the shard."""
    real = np.flatnonzero(shard.row_ids >= 0)
    lengths = shard.arrays["seq_lengths"].astype(np.int64)[real]
    cells = cells_of_runs(cells_of(shard)[real], lengths)
    return RowValues(
        shard.row_ids[real], lengths, {name: sheet.reshape(-1)[cells] for name, sheet in sheets.items()}
    )


def with_columns(shard: Shard, columns: RowValues) -> Shard:
    """The shard with the per-token `columns` of its rows as [B, W] arrays, 0 elsewhere; those it has are replaced.

    Raises:
        ConfigError: a row of the shard is not among them, or has another length there.
    """
    real = np.flatnonzero(shard.row_ids >= 0)
    own = columns.pick(_find(columns.row_ids, shard.row_ids[real]))
    lengths = shard.arrays["seq_lengths"].astype(np.int64)[real]
    if not np.array_equal(own.lengths, lengths):
        row = int(own.row_ids[np.flatnonzero(own.lengths != lengths)[0]])
        raise ConfigError("columns", f"row {row} has another length there", "give one value per token")
    cells = cells_of_runs(cells_of(shard)[real], lengths)
    arrays = dict(shard.arrays)
    for name, values in own.tokens.items():
        arrays[name] = np.zeros(shard.arrays["input_ids"].shape, values.dtype)
        arrays[name].reshape(-1)[cells] = values
    return replace(shard, arrays=arrays)


def in_order(parts: Sequence[RowValues], row_ids: Int64s) -> RowValues:
    """The rows of all ranks' `parts` in the order of `row_ids`.

    A row that is there several times (`tail: wrap`) is the same each time, so any of them will do.
    """
    together = RowValues(
        np.concatenate([part.row_ids for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        {name: np.concatenate([part.tokens[name] for part in parts]) for name in parts[0].tokens},
        {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows},
    )
    return together.pick(_find(together.row_ids, row_ids))


def _find(among: Int64s, wanted: Int64s) -> Int64s:
    order = np.argsort(among, kind="stable")
    place = np.searchsorted(among, wanted, sorter=order)
    found = order[np.minimum(place, len(order) - 1)] if len(order) else np.zeros(len(wanted), np.int64)
    if len(wanted) and (not len(order) or not np.array_equal(among[found], wanted)):
        missing = sorted(set(wanted.tolist()) - set(among.tolist()))
        raise ConfigError("columns", f"rows {missing[:5]} are missing", "give the rows of the mini-batch")
    return found

"""The rows of a mini-batch, flat, with what is counted over all of them before they are dealt to ranks.

Axes: N rows, T used tokens of all N rows one after the other.
Always true:
- the first token of a row (`stream`: of a window) is never a target, whatever its loss_mask says;
- counts are of the whole mini-batch and of real rows only;
- nothing is copied when every row is used whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from raysvc.collate.shard import Array, Denominators
from raysvc.job.config import Layout
from raysvc.plan.plan import MiniBatchPlan
from raysvc.ragged import Int64s, cells_of_runs, offsets_of
from raysvc.row_batch import RowBatch


@dataclass(frozen=True, eq=False)
class FlatRows:
    """Tokens and counts of a mini-batch, in the order of its rows.

    Attributes:
        rows: what the cache gave.
        mini: the plan.
        layout: `stream` counts windows where the others count rows.
    """

    rows: RowBatch
    mini: MiniBatchPlan
    layout: Layout

    @cached_property
    def lengths(self) -> Int64s:
        """int64 [N], used tokens of each row."""
        return self.mini.lengths.astype(np.int64)

    @cached_property
    def offsets(self) -> Int64s:
        """int64 [N + 1], index among the used tokens of each row's first one, and T."""
        return offsets_of(self.lengths)

    @property
    def firsts(self) -> Int64s:
        """int64 [N], index among the used tokens of each row's first one."""
        return self.offsets[:-1]

    @cached_property
    def _picked(self) -> Int64s | None:
        """int64 [T], where the used tokens are; None: all of them."""
        if np.array_equal(self.lengths, self.rows.lengths):
            return None
        first = self.rows.offsets[:-1] + self.mini.starts
        return cells_of_runs(first, self.lengths)

    def tokens(self, name: str) -> Array:
        """[T], the used tokens of a per-token column."""
        column = self.rows.tokens[name]
        if self._picked is not None:
            return column[self._picked]
        return column[int(self.rows.offsets[0]) : int(self.rows.offsets[-1])]

    def pieces(self, name: str) -> list[Array]:
        """N arrays [used tokens of the row, *shape] of a column of several numbers a token; views."""
        starts, lengths = self.mini.starts.tolist(), self.lengths.tolist()
        return [
            values[start : start + length]
            for values, start, length in zip(self.rows.wide[name].pieces, starts, lengths, strict=True)
        ]

    @cached_property
    def trained(self) -> npt.NDArray[np.uint8]:
        """uint8 [T], 1 where a token is a target."""
        out = self.tokens("loss_mask").astype(np.uint8, copy=True)
        begins = self.lengths > 0
        if self.layout == "stream":
            begins &= np.diff(self.mini.group_index, prepend=-1) > 0
        out[self.firsts[begins]] = 0
        return out

    @cached_property
    def row_tokens(self) -> npt.NDArray[np.int32]:
        """int32 [N], targets of each row (`stream`: of its window)."""
        out = np.zeros(len(self.lengths), np.int32)
        some = self.lengths > 0
        if some.any():
            out[some] = np.add.reduceat(self.trained, self.firsts[some], dtype=np.int32)
        if self.layout == "stream":
            return np.bincount(self.mini.group_index, out)[self.mini.group_index].astype(np.int32)
        return out

    @cached_property
    def _groups_of_one(self) -> bool:
        return np.array_equal(self.mini.group_index, np.arange(len(self.lengths)))

    @cached_property
    def group_rows(self) -> npt.NDArray[np.int32]:
        """int32 [N], rows of each row's group (`stream`: 1)."""
        if self.layout == "stream" or self._groups_of_one:
            return np.ones(len(self.lengths), np.int32)
        return np.bincount(self.mini.group_index)[self.mini.group_index].astype(np.int32)

    @cached_property
    def group_tokens(self) -> npt.NDArray[np.int32]:
        """int32 [N], targets of each row's group (`stream`: of its window)."""
        if self.layout == "stream" or self._groups_of_one:
            return self.row_tokens
        return np.bincount(self.mini.group_index, self.row_tokens)[self.mini.group_index].astype(np.int32)

    @cached_property
    def denominators(self) -> Denominators:
        """Counts of the mini-batch."""
        rows = self.mini.num_groups if self.layout == "stream" else len(self.lengths)
        return Denominators(int(np.count_nonzero(self.trained.view(np.bool_))), rows, self.mini.num_groups)

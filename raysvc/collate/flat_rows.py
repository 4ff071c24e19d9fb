"""The rows of a mini-batch, flat, with what is counted over all of them before they are dealt to ranks.

A row that holds several turns (`raysvc.rl.turns`) says of each token which turn it is of, `turn_index`, and how many turns it
holds, `turn_count`. A row may say which trajectory of its group it is of, `trajectory`.

Axes: N rows, T used tokens of all N rows one after the other.
Always true:
- the first token of a row (`stream`: of a window) is never a target, whatever its loss_mask says;
- counts are of the whole mini-batch and of real rows only; a row that holds several turns counts as so many rows;
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
    def _turns(self) -> Int64s:
        """int64 [N], rows as they were put that each row holds."""
        one = np.ones(len(self.lengths), np.int64)
        return self.rows.rows["turn_count"].astype(np.int64) if has_turns(self.rows) else one

    @cached_property
    def turn_tokens(self) -> npt.NDArray[np.int32]:
        """int32 [T], targets of the turn that each token is of; for rows that hold turns."""
        turns = np.repeat(offsets_of(self._turns)[:-1], self.lengths) + self.tokens("turn_index")
        return np.bincount(turns, self.trained)[turns].astype(np.int32)

    @cached_property
    def _trajectories(self) -> Int64s:
        """int64 [N], the number of each row's trajectory in the mini-batch."""
        own = np.stack(
            [self.mini.group_index.astype(np.int64), self.rows.rows["trajectory"].astype(np.int64)]
        )
        return np.unique(own, axis=1, return_inverse=True)[1].reshape(-1)

    @cached_property
    def trajectory_tokens(self) -> npt.NDArray[np.int32]:
        """int32 [N], targets of each row's trajectory; for rows that name theirs."""
        return np.bincount(self._trajectories, self.row_tokens)[self._trajectories].astype(np.int32)

    @cached_property
    def _groups_of_one(self) -> bool:
        return np.array_equal(self.mini.group_index, np.arange(len(self.lengths)))

    @cached_property
    def group_rows(self) -> npt.NDArray[np.int32]:
        """int32 [N], rows of each row's group (`stream`: 1)."""
        if self.layout == "stream" or self._groups_of_one:
            return self._turns.astype(np.int32)
        return np.bincount(self.mini.group_index, self._turns)[self.mini.group_index].astype(np.int32)

    @cached_property
    def group_tokens(self) -> npt.NDArray[np.int32]:
        """int32 [N], targets of each row's group (`stream`: of its window)."""
        if self.layout == "stream" or self._groups_of_one:
            return self.row_tokens
        return np.bincount(self.mini.group_index, self.row_tokens)[self.mini.group_index].astype(np.int32)

    @cached_property
    def denominators(self) -> Denominators:
        """Counts of the mini-batch."""
        rows = self.mini.num_groups if self.layout == "stream" else int(self._turns.sum())
        tokens = int(np.count_nonzero(self.trained.view(np.bool_)))
        named = has_trajectories(self.rows, self.layout)
        trajectories = int(self._trajectories.max(initial=-1)) + 1 if named else 0
        return Denominators(tokens, rows, self.mini.num_groups, trajectories)


def has_turns(rows: RowBatch) -> bool:
    """Returns whether some rows may hold several turns."""
    return "turn_index" in rows.tokens


def has_trajectories(rows: RowBatch, layout: Layout) -> bool:
    """Returns whether the rows say which trajectory they are of."""
    return layout != "stream" and "trajectory" in rows.rows and rows.rows["trajectory"].dtype.kind in "iu"

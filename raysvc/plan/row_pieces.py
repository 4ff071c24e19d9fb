"""The rows of a mini-batch before they are dealt to ranks, and with `layout: stream` the windows that cut them.

Axes: N pieces; a piece is a row, or the part of a row that lies in a window of W tokens over all documents in the entry's order.
Always true:
- `group_index` ascends by at most one from piece to piece, from 0;
- what is left out leaves a hole: the other pieces stay, in their order;
- every token of every document is in exactly one window; only the last window is shorter;
- window k holds the tokens [k * W, (k + 1) * W), whatever the order in which windows are visited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.job.config import Oversize
from raysvc.ragged import cells_of_runs, offsets_of
from raysvc.row_ids import RowPlaces

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Rows or parts of rows, group after group.

    Attributes:
        row_ids: int64 [N].
        starts: int32 [N], first token that is used.
        lengths: int32 [N], tokens that are used.
        group_index: int32 [N], number of the group in the mini-batch.
        num_truncated: rows that were cut to the budget.
        num_dropped: rows over the budget that were left out.
        num_alone: rows over the budget that stay as they are.
        num_skipped: rows in `skip_rows`.
    """

    row_ids: Int64s
    starts: Int32s
    lengths: Int32s
    group_index: Int32s
    num_truncated: int = 0
    num_dropped: int = 0
    num_alone: int = 0
    num_skipped: int = 0

    @property
    def num_groups(self) -> int:
        """Groups that have a piece."""
        return int(self.group_index[-1]) + 1 if len(self.group_index) else 0

    def without(self, skip: Int64s) -> Pieces:
        """Leave out the rows in `skip` (sorted)."""
        if not len(skip) or not (found := np.isin(self.row_ids, skip)).any():
            return self
        return replace(self._kept(~found), num_skipped=int(found.sum()))

    def whole_pairs(self) -> Pieces:
        """Leave out a row whose other one is left out."""
        alone = np.bincount(self.group_index)[self.group_index] != 2
        if not alone.any():
            return self
        return replace(self._kept(~alone), num_skipped=self.num_skipped + int(alone.sum()))

    def within(self, budget: int | None, oversize: Oversize) -> Pieces:
        """Apply the policy for rows over `budget` tokens; None: no limit."""
        if budget is None:
            return self
        return self.without_over(self.lengths > budget, budget, oversize)

    def without_over(self, over: npt.NDArray[np.bool_], limit: int, oversize: Oversize) -> Pieces:
        """Apply the policy for the rows that are `over` [N]; `limit` is what truncation leaves of one."""
        if not over.any():
            return self
        count = int(over.sum())
        if oversize == "truncate":
            cut = np.where(over, np.minimum(self.lengths, np.int32(limit)), self.lengths)
            return replace(self, lengths=cut, num_truncated=int((cut < self.lengths).sum()))
        if oversize == "drop":
            return replace(self._kept(~over), num_dropped=count)
        return replace(self, num_alone=count)

    def _kept(self, keep: npt.NDArray[np.bool_]) -> Pieces:
        return replace(
            self,
            row_ids=self.row_ids[keep],
            starts=self.starts[keep],
            lengths=self.lengths[keep],
            group_index=np.unique(self.group_index[keep], return_inverse=True)[1].astype(np.int32),
        )


class Windows:
    """Windows of `window` tokens over documents of `lengths` (int [N]); holds one int64 per document."""

    def __init__(
        self, lengths: npt.NDArray[np.integer[Any]], window: int, places: RowPlaces | None = None
    ) -> None:
        self.places = places or RowPlaces.of_rows(len(lengths))
        self.window = window
        self.offsets = offsets_of(lengths)
        self.num_windows = -(-int(self.offsets[-1]) // window)

    def pieces_of(self, windows: Int64s) -> Pieces:
        """The parts of documents in `windows` (int64 [P]), window after window; a group is a window."""
        begins = windows * self.window
        ends = np.minimum(begins + self.window, self.offsets[-1])
        first = np.searchsorted(self.offsets, begins, side="right") - 1
        count = np.searchsorted(self.offsets, ends, side="left") - first
        index = np.repeat(np.arange(len(windows)), count)
        rows = cells_of_runs(first, count)
        starts = np.maximum(begins[index], self.offsets[rows]) - self.offsets[rows]
        lengths = np.minimum(ends[index], self.offsets[rows + 1]) - self.offsets[rows] - starts
        some = lengths > 0  # documents without a token
        return Pieces(
            row_ids=self.places.ids_of(rows[some]),
            starts=starts[some].astype(np.int32),
            lengths=lengths[some].astype(np.int32),
            group_index=index[some].astype(np.int32),
        )

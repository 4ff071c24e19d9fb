"""`layout: stream`: windows of W tokens over all documents, one after the other in the order of the entry.

Axes: N documents (rows), W tokens of a window.
Always true:
- every token of every document is in exactly one window; only the last window is shorter;
- window k holds the tokens [k * W, (k + 1) * W), whatever the order in which windows are visited.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.plan.row_pieces import Int64s, Pieces
from raysvc.ragged import cells_of_runs, offsets_of
from raysvc.row_ids import RowPlaces


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

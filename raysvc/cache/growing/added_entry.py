"""Columns that are computed while the slices of their rows come: as an entry that adds columns to a finished one.

Axes: S slices.
Always true:
- a slice is there when its rows and its columns are; what is served of it is what the finished entry will have;
- a row has the number that its rows have;
- when both are finished, all is read from the parts that their manifests name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.cache.entry import Entry
from raysvc.cache.growing.coming import AddedSpec
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.cache.growing.listings import Listings
from raysvc.cache.growing.slice_receipts import SliceReceipts, slices_of
from raysvc.cache.manifest import Manifest
from raysvc.cache.store.store import Store


class AddedEntry(GrowingEntry):
    """One generation of a key whose columns somebody computes, or has just computed."""

    base: Entry

    def __init__(self, store: Store, folder: str, spec: AddedSpec, base: Entry) -> None:
        """Nothing is read.

        Args:
            store, folder: where the columns are computed.
            spec: what is known of them.
            base: the rows, to be read while they come.
        """
        self.coming = spec
        self._growing = threading.Lock()  # guards what is appended to the slices
        rows = base.source_rows.tolist()
        self.receipts = SliceReceipts(store, folder, rows, [base.key] * len(rows), are_added=True)
        manifest = Manifest(spec.key, (), self.receipts.columns, spec.recipe, dict(base.report))
        Entry.__init__(self, store, folder, manifest, base=base)

    def _starts(self) -> npt.NDArray[np.int64]:
        return self.base.slice_starts

    def __reduce__(self) -> tuple[Any, ...]:
        return AddedEntry, (self.store, self.folder, self.coming, self.base)

    @property
    def num_rows(self) -> int:
        """Rows of the source, as its base says."""
        return self.base.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of all slices; waits for their rows."""
        return self.base.num_tokens

    @property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """int64 [S], rows of the source in each slice that is known by now."""
        return self.base.source_rows

    @property
    def listings(self) -> Listings | None:
        """The listings of its source, where that is followed."""
        return self.base.listings

    @property
    def num_known(self) -> int:
        """Rows of the source that have a slice by now."""
        return self.base.num_known

    def knows(self, num_groups: int) -> bool:
        """Whether it is known in which slices the first rows of the source are."""
        return self.base.knows(num_groups)

    def wait_until_known(self, num_groups: int) -> float:
        """Wait until that is known; seconds.

        Raises:
            EntryError: nobody looks for more rows.
        """
        return self.base.wait_until_known(num_groups)

    def lengths(self) -> npt.NDArray[np.int32]:
        """int32 [N], tokens of the rows of its base."""
        return self.base.lengths()

    def has(self, slices: Sequence[int]) -> bool:
        """Whether all of these slices have their columns."""
        self.look()
        return self.base.has(slices) and self.receipts.has(slices)

    def look(self) -> None:
        """Take in the slices that its base has more than before."""
        with self._growing:
            more = self.base.source_rows[self.receipts.num_slices :].tolist()
            self.receipts.extend(more, [self.base.key] * len(more))

    def lacks(self, slices: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [N], whether there is no such row in a slice; what is not tokenized yet may be there."""
        return self.base.lacks(slices, rows)

    def wait_for(self, slices: Sequence[int]) -> float:
        """Wait until these slices have their columns; seconds.

        Raises:
            EntryError: the build of rows or columns has failed.
        """
        seconds = self.base.wait_for(slices)
        self.look()
        return seconds + self.receipts.wait_for(slices)

    def first_row(self) -> int:
        """The number of a row that has its columns; waits for the first slice of them."""
        self.look()
        return super().first_row()

    def row_ids(self, first: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Returns what its base does."""
        return self.base.row_ids(first, stop)

    def fail(self, why: str) -> None:
        """Nobody builds rows or columns any more; whoever waits for a slice is told why. "": somebody builds again."""
        self.base.fail(why)
        self.receipts.fail(why)


def of_rows(base: Entry) -> list[dict[str, Any]]:
    """Returns what receipts of columns say of each slice, where it is one of the rows: their key says what it holds."""
    rows = base.source_rows.tolist()
    return slices_of(rows, [base.key] * len(rows))

"""The entry of a source that is followed: as an entry that grows, and its source grows too.

Axes: S slices that are known by now.
Always true:
- slices are those of the listings, and a listing is read before a row of it is asked for;
- it never has a manifest: parts are named by receipts of just the rows that the listing names;
- a row keeps its number for ever, as `raysvc.row_ids` gives it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.cache.entry import Entry
from raysvc.cache.growing.coming import FollowedSpec
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.cache.growing.listings import REMEDY, Listings
from raysvc.cache.growing.slice_receipts import MOST_LOOK_S, SliceReceipts
from raysvc.cache.manifest import Manifest
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError
from raysvc.ragged import Int64s
from raysvc.row_ids import MOST_SLICES, slice_base


class FollowedEntry(GrowingEntry):
    """One generation of a key whose source is followed."""

    def __init__(
        self,
        store: Store,
        folder: str,
        spec: FollowedSpec,
        report: Mapping[str, Any] | None = None,
    ) -> None:
        """The listings are read.

        Args:
            store, folder: where it is built.
            spec: what is known of it.
            report: of all slices, by who has built them.

        Raises:
            EntryError: there are no listings, or other ones.
        """
        self.coming = self._spec = spec
        self.receipts = SliceReceipts(store, folder, (), ())
        self._listings = Listings(store, spec.listings)
        self._growing = threading.Lock()  # guards what is appended to the slices
        self._source_rows = np.zeros(0, np.int64)
        self._num_listings = 0  # whose slices are known here
        self._looked_s = 0.0
        self.look()
        manifest = Manifest(spec.key, (), self.receipts.columns, spec.recipe, report or spec.report)
        Entry.__init__(self, store, folder, manifest)

    def _starts(self) -> Int64s:
        return slice_base(np.arange(MOST_SLICES + 1, dtype=np.int64))

    @property
    def listings(self) -> Listings:
        """The listings of its source, as far as they are known here."""
        return self._listings

    @property
    def source_rows(self) -> Int64s:
        """int64 [S], rows of the source in each slice that is known by now."""
        return self._source_rows

    @property
    def num_known(self) -> int:
        """Rows of the source that have a slice by now."""
        return int(self._listings.ends[self._num_listings - 1]) if self._num_listings else 0

    def knows(self, num_groups: int) -> bool:
        """Returns whether the listings have so many rows of the source; looks for new ones, twice a second at most."""
        if self.num_known < num_groups and time.monotonic() - self._looked_s > MOST_LOOK_S / 2:
            self.look()
        return self.num_known >= num_groups

    def wait_until_known(self, num_groups: int) -> float:
        """Wait until the listings have so many rows of the source; seconds.

        Raises:
            EntryError: nobody follows any more.
        """
        begin = time.monotonic()
        self.receipts.wait_until(
            lambda: self.knows(num_groups), f"row {num_groups} of its source", "; it comes with new files"
        )
        return time.monotonic() - begin

    def lengths(self) -> npt.NDArray[np.int32]:
        """int32 [N], tokens of these rows."""
        return np.concatenate([np.zeros(0, np.int32), *self.lengths_by_slice()])

    def is_finished(self) -> bool:
        """Never."""
        return False

    def look(self) -> None:
        """Read the listings that were added.

        Raises:
            EntryError: they are not those that the entry was made of.
        """
        with self._growing:
            self._listings.refresh()
            if self._listings.uid != self._spec.uid:
                what = f"the listings {self._spec.listings} of its source are gone, or others"
                raise EntryError(f"{self.receipts.where}", what, REMEDY)
            self._looked_s = time.monotonic()
            for listing in self._listings.known[self._num_listings :]:
                self.receipts.extend(listing.groups.tolist(), listing.contents)
                self._source_rows = np.append(self._source_rows, listing.groups)
                self._num_listings += 1

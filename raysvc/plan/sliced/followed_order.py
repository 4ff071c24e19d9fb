"""The order of a source that is followed: its listings one after the other, each in the order of a window.

Axes: K listings that are known by now, P positions asked for.
Always true:
- where a listing begins, and the order in it, follow from the listings before it and from the seed: what comes later moves nothing;
- every row of the source that is listed comes once, and there is one epoch;
- positions may be asked for in any order, from several threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from raysvc import row_ids
from raysvc.cache.growing.listings import Listing, Listings
from raysvc.plan.order import GroupOrder
from raysvc.plan.schedule import ENDLESS
from raysvc.plan.sliced.window_order import WindowOrder
from raysvc.ragged import Int64s

ORDERS_KEPT = 256


class FollowedOrder(GroupOrder):
    """Order of the rows of a source without an end.

    Args:
        listings: of the source.
        window_of: W of a listing.
        seed: of the run.

    Attributes:
        num_groups: nobody knows; `ENDLESS`.
    """

    num_groups = ENDLESS

    def __init__(self, listings: Listings, window_of: Callable[[Listing], int], seed: int) -> None:
        self._listings = listings

        def of_listing(number: int) -> WindowOrder:
            listing = listings.known[number]
            return WindowOrder(listing.groups, window_of(listing), seed, salt=f"followed/{number}")

        self._order = lru_cache(ORDERS_KEPT)(of_listing)

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        """Rows of the source at `positions` (int64 [P]); the listings have to have them."""
        assert epoch == 0, "a source that is followed has one epoch"
        ends = self._listings.ends
        which = np.searchsorted(ends, positions, side="right")
        out = np.empty_like(positions)
        for number in np.unique(which).tolist():
            here = np.flatnonzero(which == number)
            listing, begin = self._listings.known[number], int(ends[number - 1]) if number else 0
            found = self._order(number).at(0, positions[here] - begin)
            out[here] = found + row_ids.slice_base(listing.first_slice)
        return out

    def needs_from(self, epoch: int, position: int) -> tuple[Int64s, Int64s]:
        """Slices [S] of the listings from the one that has this position on, and the position from which on each is needed [S]."""
        assert epoch == 0, "a source that is followed has one epoch"
        ends = self._listings.ends
        first = int(np.searchsorted(ends, position, side="right"))
        slices, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for number in range(first, len(ends)):
            begin = int(ends[number - 1]) if number else 0
            found, needed = self._order(number).needs_from(0, max(position - begin, 0))
            slices.append(found + self._listings.known[number].first_slice)
            places.append(needed + begin)
        return np.concatenate(slices), np.concatenate(places)

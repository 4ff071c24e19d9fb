"""Defines what a plan asks of its rows, and the rows whose lengths are held.

Axes: N rows, G groups, P groups asked for.
Always true:
- nothing of a row is known here but its number, its length and its group.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raysvc.errors import PlanError
from raysvc.plan.groups import Groups
from raysvc.ragged import Int64s
from raysvc.row_ids import RowPlaces

Int32s = npt.NDArray[np.int32]
NO_ROW = (
    "take the id from a row log, or from raysvc plan --step; "
    "raysvc show --source-row finds a row by its number in the source"
)


class PlanRows(Protocol):
    """Rows of a plan, by their numbers."""

    @property
    def num_rows(self) -> int:
        """N."""

    @property
    def num_groups(self) -> int:
        """G."""

    @property
    def are_pairs(self) -> bool:
        """Returns whether the two rows of a group share a micro-batch."""

    @property
    def are_sliced(self) -> bool:
        """Returns whether the plan goes slice by slice, and knows no length before it opens one."""

    @property
    def digest(self) -> str:
        """sha256 of what makes groups or slices of the rows; "" where every row is its own group."""

    def rows_of(self, groups: Int64s) -> tuple[Int64s, Int32s]:
        """Rows of `groups` [P], group after group: numbers int64 [n], and the number of each row's group, int32 [n]."""

    def lengths_of(self, row_ids: Int64s) -> Int32s:
        """Tokens of rows."""

    @property
    def have_media(self) -> bool:
        """Returns whether some row may have media."""

    def patches_of(self, row_ids: Int64s) -> Int64s | None:
        """Work of a media encoder, of rows; None: no row has media."""

    def check(self, row_ids: Int64s) -> None:
        """Refuse rows that are not there.

        Raises:
            PlanError: names the first of them.
        """

    def longest(self) -> npt.NDArray[np.integer[Any]]:
        """Lengths of rows that need the most room, as far as that is known: all of them, an upper bound, or none."""


class HeldRows:
    """Rows whose lengths are all at hand.

    Args:
        lengths: int [N]; may be a memory map, is never copied.
        groups: of these rows.
        patches: int [N], of their media; None: they have none.
        places: of the rows in slices; None: an id is a position.

    Raises:
        PlanError: the groups are of another number of rows.
    """

    are_sliced = False

    def __init__(
        self,
        lengths: npt.NDArray[np.integer[Any]],
        groups: Groups,
        patches: npt.NDArray[np.integer[Any]] | None = None,
        places: RowPlaces | None = None,
    ) -> None:
        if groups.num_rows != len(lengths):
            raise PlanError("uid", f"{groups.num_rows} uids for {len(lengths)} rows", "give one uid per row")
        self.lengths, self.groups, self.patches = lengths, groups, patches
        self.places = places or RowPlaces.of_rows(len(lengths))

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def num_groups(self) -> int:
        """G."""
        return self.groups.num_groups

    @property
    def are_pairs(self) -> bool:
        """See `Groups`."""
        return self.groups.are_pairs

    @property
    def digest(self) -> str:
        """See `Groups`."""
        return self.groups.digest

    def rows_of(self, groups: Int64s) -> tuple[Int64s, Int32s]:
        """Rows of groups, by their ids; see `Groups.rows_of`."""
        positions, index = self.groups.rows_of(groups)
        return self.places.ids_of(positions), index

    def lengths_of(self, row_ids: Int64s) -> Int32s:
        """Tokens of rows."""
        return np.asarray(self.lengths[self.places.positions_of(row_ids)], np.int32)

    @property
    def have_media(self) -> bool:
        """Returns whether some row has media."""
        return self.patches is not None and bool(self.patches.any())

    def patches_of(self, row_ids: Int64s) -> Int64s | None:
        """Returns the patches of these rows."""
        if self.patches is None:
            return None
        return self.patches[self.places.positions_of(row_ids)].astype(np.int64)

    def check(self, row_ids: Int64s) -> None:
        """Refuse rows that are not there.

        Raises:
            PlanError: names the first of them.
        """
        try:
            self.places.positions_of(row_ids)
        except IndexError as error:
            raise PlanError("row", str(error), NO_ROW) from None

    def longest(self) -> npt.NDArray[np.integer[Any]]:
        """All lengths."""
        return self.lengths

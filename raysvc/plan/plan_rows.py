"""Rows of a plan whose lengths are held; `raysvc.plan.sliced` has those that are known slice by slice.

Axes: N rows, G groups, P groups asked for.
Always true:
- nothing of a row is known here but its number, its length and its group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.errors import PlanError
from raysvc.job.config import PlanConfig
from raysvc.plan.groups import Groups, OrderRows
from raysvc.plan.order import CustomOrder, Order, parse_shuffle
from raysvc.plan.sliced.window_order import is_windowed
from raysvc.ragged import Int64s
from raysvc.row_ids import RowPlaces

Int32s = npt.NDArray[np.int32]
NO_ROW = (
    "take the id from a row log, or from raysvc plan --step; "
    "raysvc show --source-row finds a row by its number in the source"
)


class HeldRows:
    """Rows whose lengths are all at hand: those of a plan, or of one source beside others that are windowed.

    Args:
        lengths: int [N]; may be a memory map, is never copied.
        groups: of these rows.
        patches: int [N], of their media; None: they have none.
        places: of the rows in slices; None: an id is a position.
        row_values: a per-row column of all rows by name, [N], for `plan.order`.

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
        row_values: Callable[[str], npt.NDArray[Any]] | None = None,
    ) -> None:
        if groups.num_rows != len(lengths):
            raise PlanError("uid", f"{groups.num_rows} uids for {len(lengths)} rows", "give one uid per row")
        self.lengths, self.groups, self.patches = lengths, groups, patches
        self.places = places or RowPlaces.of_rows(len(lengths))
        self._row_values = row_values or _no_columns

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
        """Returns whether the two rows of a group share a micro-batch."""
        return self.groups.are_pairs

    @property
    def digest(self) -> str:
        """See `Groups`."""
        return self.groups.digest

    def order(self, config: PlanConfig, num_groups: int) -> Order | CustomOrder:
        """The order of so many groups, where no mixture orders them.

        Raises:
            PlanError: it goes by slices.
        """
        if is_windowed(config.shuffle):
            raise PlanError(
                "plan.shuffle", f"{config.shuffle} needs the slices of an entry", "use full or block(n)"
            )
        if config.order is None:
            return Order(num_groups, config.seed, parse_shuffle(config.shuffle))
        rows = OrderRows.of(self.groups, self.lengths, config.seed, self._row_values)
        return CustomOrder(config.order, rows)

    def spans(self, groups: Int64s) -> tuple[Int64s, Int64s]:
        """The first row of each group, whose rows lie together, and how many rows it has."""
        first, size = self.groups.spans(groups)
        return self.places.ids_of(first), size

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
        """Lengths of the rows that need the most room: all of them."""
        return self.lengths


def _no_columns(name: str) -> npt.NDArray[Any]:
    raise KeyError(name)

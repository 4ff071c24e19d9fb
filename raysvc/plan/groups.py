"""Finds the rows of each group.

Axes: N rows, G groups.
Always true:
- groups are numbered by first appearance, and a group's rows keep their order;
- rows of one uid are gathered even when other rows lie between them;
- runs are the groups that lie together already: their bounds are all that is held;
- an empty or doubled group is an error that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.errors import PlanError
from raysvc.ragged import Int64s, cells_of_runs, offsets_of


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows by group; without `rows` every row is its own group and nothing is held.

    Attributes:
        num_rows: N.
        num_groups: G.
        rows: int64 [N], row numbers, group after group; None: they lie in this order already.
        bounds: int64 [G + 1], where each group begins in `rows`; None: group g is row g.
        digest: sha256 of the uids or bounds, "" when every row is its own group.
        are_pairs: the two rows of a group share a micro-batch; one that lost its other is left out.
    """

    num_rows: int
    num_groups: int
    rows: Int64s | None = None
    bounds: Int64s | None = None
    digest: str = ""
    are_pairs: bool = False

    @classmethod
    def singles(cls, num_rows: int) -> Groups:
        """Every row is its own group."""
        return cls(num_rows, num_rows)

    @classmethod
    def of_uids(cls, uids: Sequence[str]) -> Groups:
        """Groups of a list with one uid per row.

        Raises:
            PlanError: a row without a uid.
        """
        numbers: dict[str, int] = {}
        group_of_row = np.fromiter(
            (numbers.setdefault(uid, len(numbers)) for uid in uids), np.int64, len(uids)
        )
        if "" in numbers:
            row = uids.index("")
            raise PlanError("uid", f"row {row} has an empty uid", "give every row the uid of its prompt")
        sizes = np.bincount(group_of_row, minlength=len(numbers))
        return cls(
            num_rows=len(uids),
            num_groups=len(numbers),
            rows=np.argsort(group_of_row, kind="stable").astype(np.int64),
            bounds=offsets_of(sizes),
            digest=_digest(uids),
        )

    @classmethod
    def of_runs(cls, bounds: Int64s, are_pairs: bool = False) -> Groups:
        """Groups of rows that lie one after the other.

        Args:
            bounds: int64 [G + 1], the first row of each group, and N.
            are_pairs: every group has two rows, which belong together.
        """
        digest = hashlib.sha256(bounds.astype("<i8").tobytes()).hexdigest()
        return cls(int(bounds[-1]), len(bounds) - 1, bounds=bounds, digest=digest, are_pairs=are_pairs)

    def spans(self, groups: Int64s) -> tuple[Int64s, Int64s]:
        """The first row of each group in `rows`, and how many rows it has; int64 [P] each."""
        if self.bounds is None:
            return groups, np.ones(len(groups), np.int64)
        return self.bounds[groups], self.bounds[groups + 1] - self.bounds[groups]

    def rows_of(self, groups: Int64s) -> tuple[Int64s, npt.NDArray[np.int32]]:
        """Rows of `groups` [P], group after group: numbers int64 [n], and index into `groups` int32 [n]."""
        if self.bounds is None:
            return groups, np.arange(len(groups), dtype=np.int32)
        starts, sizes = self.spans(groups)
        index = np.repeat(np.arange(len(groups), dtype=np.int32), sizes)
        cells = cells_of_runs(starts, sizes)
        return cells if self.rows is None else self.rows[cells], index


@dataclass(frozen=True, eq=False)
class OrderRows:
    """Holds what an order may look at.

    Attributes:
        num_groups: G; a group is a row, or the rows that belong together.
        seed: `plan.seed`.
        lengths: int64 [G], tokens of each group.
    """

    num_groups: int
    seed: int
    lengths: Int64s
    _firsts: Int64s = field(repr=False)
    _row_values: Callable[[str], npt.NDArray[Any]] = field(repr=False)

    @classmethod
    def of(
        cls,
        groups: Groups,
        row_lengths: npt.NDArray[np.integer[Any]],
        seed: int,
        row_values: Callable[[str], npt.NDArray[Any]],
    ) -> OrderRows:
        """Describes rows of `row_lengths` (int [N])."""
        lengths, firsts = row_lengths.astype(np.int64), np.arange(groups.num_groups)
        if groups.bounds is not None:
            rows = np.arange(groups.num_rows) if groups.rows is None else groups.rows
            lengths = np.add.reduceat(lengths[rows], groups.bounds[:-1])
            firsts = rows[groups.bounds[:-1]]
        return cls(groups.num_groups, seed, lengths, firsts, row_values)

    def column(self, name: str) -> npt.NDArray[Any]:
        """[G], a per-row column of the entry, of the first row of each group.

        Raises:
            KeyError: the entry has no such column.
        """
        return self._row_values(name)[self._firsts]


def _digest(uids: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for uid in uids:
        data = uid.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.hexdigest()

"""Swaps rows between ranks until the work of a media encoder is even too.

The ranks come dealt evenly by the work of the language model. A row also brings patches to an encoder, and has as many whatever
its text, so both are evened out together.

Axes: N rows, R ranks, S rows of one rank.

1. Give each row two shares, of the language model's work and of the encoder's; a rank's mean is `_MEAN` in both.
2. Find the rank that is furthest over the mean in one of them.
3. Swap one of its rows with one of a rank that is low in it: of the swaps that fit, the one that leaves the smallest squares.
4. Stop when no rank is over by more than the tolerance, or no swap helps.
5. Where micro-batches have a budget, do so with whole ones first: few swaps of rows fit where they are full.
6. Sort each rank again, costliest first.

Always true:
- every rank keeps its number of rows, lines and micro-batches, and its dummies;
- budgets of packs and micro-batches are kept;
- the result is a pure function of lengths and patches, in integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Line = list[int]
Rank = list[list[Line]]  # micro-batches of lines of rows; -1 is a dummy

_MEAN = 1 << 26
_TOLERANCE = _MEAN // 200  # 0.5 %
_SWAPS_PER_RANK = 16
_ROWS_TRIED = 256  # of each of two ranks, for one swap


@dataclass(frozen=True, eq=False)
class Fit:
    """Holds what a swap has to keep.

    Attributes:
        sizes: int64 [N], cells of each row.
        budget: cells of a line (`by_line`), or of rows times the widest one in a micro-batch; None: everything fits.
        by_line: rows share lines.
    """

    sizes: Int64s
    budget: int | None
    by_line: bool


def even_out(ranks: Sequence[Rank], costs: Int64s, patches: Int64s, fit: Fit) -> list[Rank]:
    """The ranks after swaps.

    Args:
        ranks: R.
        costs: int64 [N], of the language model, by row.
        patches: int64 [N], by row.
        fit: what to keep.
    """
    if fit.budget is not None:  # 5
        ranks = _whole_ones_swapped(ranks, costs, patches)
    dealt = [_RankRows.of(rank, fit) for rank in ranks]
    _swap_until_even(dealt, costs, patches)
    return [_sorted(one.back(rank), costs, fit) for one, rank in zip(dealt, ranks, strict=True)]  # 6


def _whole_ones_swapped(ranks: Sequence[Rank], costs: Int64s, patches: Int64s) -> list[Rank]:
    """The ranks after swaps of whole micro-batches."""
    micros = [micro for rank in ranks for micro in rank]
    rows = [[row for line in micro for row in line if row >= 0] for micro in micros]
    of_micros = [np.array([values[each].sum() for each in rows], np.int64) for values in (costs, patches)]
    number = iter(range(len(micros)))
    dealt = [_RankRows.of([[[next(number)]] for _ in rank], Fit(of_micros[0], None, False)) for rank in ranks]
    _swap_until_even(dealt, *of_micros)
    return [[micros[each] for each in one.rows.tolist()] for one in dealt]


def _swap_until_even(dealt: list[_RankRows], costs: Int64s, patches: Int64s) -> None:
    shares = np.stack([_shares(costs, len(dealt)), _shares(patches, len(dealt))], axis=1)  # 1
    loads = np.stack([shares[one.rows].sum(axis=0) for one in dealt])
    for _ in range(_SWAPS_PER_RANK * len(dealt)):
        heavy, kind = divmod(int(loads.argmax()), 2)  # 2
        if loads[heavy, kind] <= _MEAN + _TOLERANCE or not _swap(dealt, loads, shares, heavy, kind):  # 4
            break


def _shares(costs: Int64s, num_ranks: int) -> Int64s:
    """Costs in units of which a rank has `_MEAN` on average."""
    bits = int(costs.max(initial=0)).bit_length() + num_ranks.bit_length() + _MEAN.bit_length() - 62
    small = costs >> max(0, bits)
    return np.asarray(small * (num_ranks * _MEAN) // max(1, int(small.sum())))


@dataclass(eq=False)
class _RankRows:
    """The real rows of a rank, and the room of what each one is in.

    Attributes:
        rows: int64 [S].
        line: int64 [S], number of each one's line, or of its micro-batch.
        room: int64 by line: free cells; by micro-batch: the widest row that it may hold.
        fit: what to keep.
    """

    rows: Int64s
    line: Int64s
    room: Int64s
    fit: Fit

    @classmethod
    def of(cls, rank: Rank, fit: Fit) -> _RankRows:
        lines = (
            [line for micro in rank for line in micro]
            if fit.by_line
            else [[row for line in micro for row in line] for micro in rank]
        )
        real = [(row, number) for number, line in enumerate(lines) for row in line if row >= 0]
        rows, line = np.array(real, np.int64).reshape(-1, 2).T
        budget = fit.budget or 0
        if fit.by_line:
            used = np.bincount(line, weights=fit.sizes[rows], minlength=len(lines)).astype(np.int64)
            room = budget - used
        else:
            room = np.array([budget // max(1, len(each)) for each in lines], np.int64)
        return cls(rows.copy(), line.copy(), room, fit)

    def some(self) -> Int64s:
        """Places whose rows are tried."""
        return np.arange(0, len(self.rows), -(-len(self.rows) // _ROWS_TRIED) or 1)

    def takes(self, here: Int64s, other: Int64s) -> Bools | bool:
        """bool [here, other], whether each place may hold the other row (numbers of rows) instead of its own."""
        if self.fit.budget is None:
            return True
        sizes, room = self.fit.sizes, self.room[self.line[here]]
        if self.fit.by_line:
            room = room + sizes[self.rows[here]]
        return np.asarray(sizes[other][None, :] <= room[:, None])

    def put(self, place: int, row: int) -> None:
        if self.fit.by_line:
            self.room[self.line[place]] += self.fit.sizes[self.rows[place]] - self.fit.sizes[row]
        self.rows[place] = row

    def back(self, rank: Rank) -> Rank:
        """The rank with the rows that are in its places now."""
        rows = iter(self.rows.tolist())
        return [[[next(rows) if row >= 0 else row for row in line] for line in micro] for micro in rank]


def _swap(dealt: list[_RankRows], loads: Int64s, shares: Int64s, heavy: int, kind: int) -> bool:
    """Make the best swap of the heavy rank with one that is low in that kind; whether there was one."""
    mine = dealt[heavy]
    here = mine.some()
    for low in np.argsort(loads[:, kind], kind="stable").tolist():
        theirs = dealt[low]
        if low == heavy or not len(theirs.rows):
            continue
        there = theirs.some()
        moved = shares[mine.rows[here]][:, None] - shares[theirs.rows[there]][None, :]
        before = _squares(loads[heavy]) + _squares(loads[low])
        gain = before - _squares(loads[heavy] - moved) - _squares(loads[low] + moved)
        fits = mine.takes(here, theirs.rows[there]) & np.transpose(theirs.takes(there, mine.rows[here]))
        gain = np.where(fits, gain, 0)
        best = int(gain.argmax())
        if gain.flat[best] > 0:
            place, other = int(here[best // len(there)]), int(there[best % len(there)])
            change = moved[best // len(there), best % len(there)]
            loads[heavy] -= change
            loads[low] += change
            row = int(mine.rows[place])
            mine.put(place, int(theirs.rows[other]))
            theirs.put(other, row)
            return True
    return False


def _squares(loads: Int64s) -> Int64s:
    """Sum over both kinds of the square of what is over or under the mean."""
    away = np.clip(loads - _MEAN, -(1 << 29), 1 << 29)
    return np.asarray((away * away).sum(axis=-1))


def _sorted(rank: Rank, costs: Int64s, fit: Fit) -> Rank:
    """Costliest micro-batch first; without a budget rows are free to change theirs, and are sorted over the whole rank."""

    def cost(rows: Line) -> int:
        return -sum(int(costs[row]) for row in rows if row >= 0)

    if fit.budget is None:
        lines = sorted((line for micro in rank for line in micro), key=cost)
        bounds = np.cumsum([0] + [len(micro) for micro in rank]).tolist()
        return [lines[start:stop] for start, stop in pairwise(bounds)]
    return sorted(rank, key=lambda micro: sum(map(cost, micro)))

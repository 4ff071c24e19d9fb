"""Gives each micro-batch its own context-parallel size, from the lengths of its documents. Pure.

Axes: N documents, R ranks (dp x cp of them, a power of two), K micro-batches of every rank.

1. For a number of micro-batches, guess the time T that the slowest group of ranks may take.
2. A document that fits one of the smallest groups within T and within the tokens that a rank holds may go anywhere; any other goes,
   longest first, to groups of the smallest size that does.
3. All ranks that are left form groups of the smallest size; the other documents go, longest first, where least was given so far.
4. Halve the interval of T until it is narrow; keep the fewest seconds over a few K and a few smallest sizes.
5. Deal the groups to micro-batches, the slowest first, so that those which wait for one another take about as long.

Always true:
- every document is in one group;
- a group of C ranks holds at most C times the tokens of a rank, each document rounded up to 2 * C for the zigzag;
- sizes are powers of two, and the groups of a micro-batch, largest first, tile the R ranks: a group begins at a multiple of its size;
- every rank has K micro-batches, so also K times the collectives; a group without a document trains a dummy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Protocol

Need = tuple[int, int]  # cells and pairs of a document
# T is known to a hundredth; two numbers of micro-batches and every third smallest size are tried
_NARROW, _COUNTS, _SIZES, _DOUBLINGS = 0.01, 2, 3, 12


class Costs(Protocol):
    """Says what a group of ranks takes."""

    def pairs(self, length: int, size: int) -> int:
        """Pairs of tokens of a document that attend to one another, as the kernels of `size` ranks count them."""

    def seconds(self, cells: float, pairs: float, size: int) -> float:
        """Seconds of `size` ranks for documents of so many cells and pairs together."""


@dataclass(eq=False)
class Group:
    """Ranks that train documents together.

    Attributes:
        size: C.
        documents: numbers of documents.
        cells: tokens, each document rounded up to 2 * C.
        pairs: of tokens that attend to one another, as kernels count them.
    """

    size: int
    documents: list[int] = field(default_factory=list)
    cells: int = 0
    pairs: int = 0

    def takes(self, need: Need, most_cells: int, most_seconds: float, costs: Costs) -> bool:
        """Whether there is room and time for a document."""
        cells, pairs = self.cells + need[0], self.pairs + need[1]
        return cells <= most_cells and costs.seconds(cells, pairs, self.size) <= most_seconds

    def add(self, document: int, need: Need) -> None:
        """Take a document in."""
        self.documents.append(document)
        self.cells += need[0]
        self.pairs += need[1]


def need_of(length: int, size: int, costs: Costs) -> Need:
    """What a document takes of a group."""
    cells = length if size == 1 else -(-length // (2 * size)) * 2 * size
    return cells, costs.pairs(length, size)


@dataclass(frozen=True, eq=False)
class Packer:
    """Packs the same documents again and again.

    Attributes:
        lengths: of the documents.
        limit: tokens that a rank holds.
        costs: what a group of ranks takes.
        needs: by size, what each document takes, the longest first.
    """

    lengths: Sequence[int]
    limit: int
    costs: Costs
    needs: dict[int, list[Need]] = field(default_factory=dict)

    @cached_property
    def order(self) -> list[int]:
        """Documents, the longest first."""
        return sorted(range(len(self.lengths)), key=lambda number: -self.lengths[number])

    def _needs(self, size: int) -> list[Need]:
        if size not in self.needs:
            self.needs[size] = [need_of(self.lengths[number], size, self.costs) for number in self.order]
        return self.needs[size]

    def fastest(self, places: int, sizes: Sequence[int], below: float) -> list[Group] | None:
        """Groups of `places` ranks together, the slowest of which takes about as little as possible; None: not less than `below`."""
        ideal = (
            self.costs.seconds(sum(self.lengths), sum(length**2 for length in self.lengths) / 2, 1) / places
        )
        low, high, best = ideal, 1.2 * ideal, None
        for _ in range(_DOUBLINGS):
            high = min(high, below)
            best = self.within(high, places, sizes)
            if best is not None or high == below:
                break
            low, high = high, 2 * high
        while best is not None and high > (1 + _NARROW) * low:
            middle = (low * high) ** 0.5
            groups = self.within(middle, places, sizes)
            low, high, best = (middle, high, best) if groups is None else (low, middle, groups)
        return best

    def within(self, target: float, places: int, sizes: Sequence[int]) -> list[Group] | None:
        """Groups that take at most `target` seconds each, or None."""
        groups: list[Group] = []
        done = 0
        while done < len(self.order):  # 2
            size = next((size for size in sizes if self._alone(done, size, target)), None)
            if size is None:
                return None
            if size == sizes[0]:
                break
            need, most = self._needs(size)[done], size * self.limit
            fitting = (
                one for one in groups if one.size == size and one.takes(need, most, target, self.costs)
            )
            group = next(fitting, None)
            if group is None:
                group = Group(size)
                groups.append(group)
                places -= size
            group.add(self.order[done], need)
            done += 1
        if places < 0:
            return None
        groups += [Group(sizes[0]) for _ in range(places // sizes[0])]
        return groups if self._spread(done, groups, target) else None

    def _alone(self, place: int, size: int, target: float) -> bool:
        return Group(size).takes(self._needs(size)[place], size * self.limit, target, self.costs)

    def _spread(self, done: int, groups: list[Group], target: float) -> bool:  # 3
        """Give documents to the group that takes the fewest seconds so far and has room; whether all found one."""
        least = [(time_of(group, self.costs), number) for number, group in enumerate(groups)]
        heapify(least)
        narrow: list[tuple[int, float, int]] = []  # (-free cells, seconds, group): no room for a longer one
        needs = {size: self._needs(size) for size in {group.size for group in groups}}
        for place in range(done, len(self.order)):
            length, left = self.lengths[self.order[place]], []
            while narrow and -narrow[0][0] >= length:
                _, load, number = heappop(narrow)
                heappush(least, (load, number))
            while least:
                load, number = heappop(least)
                group = groups[number]
                need, most = needs[group.size][place], group.size * self.limit
                if group.takes(need, most, target, self.costs):
                    group.add(self.order[place], need)
                    heappush(least, (time_of(group, self.costs), number))
                    break
                left.append((group.cells - most, load, number))
            else:
                return False
            for entry in left:
                heappush(narrow, entry)
        return True


def plan_groups(
    lengths: Sequence[int], ranks: int, limit: int, costs: Costs, sizes: Sequence[int]
) -> list[list[Group]]:
    """The groups of each micro-batch, largest first.

    Args:
        lengths: of the documents; the longest fits the largest of `sizes`.
        ranks: R.
        limit: tokens that a rank holds.
        costs: what a group of ranks takes.
        sizes: the sizes of groups, ascending powers of two that divide R; one alone is a fixed size.
    """
    assert need_of(max(lengths), sizes[-1], costs)[0] <= sizes[-1] * limit
    packer = Packer(lengths, limit, costs)
    best: list[list[Group]] | None = None
    count, tried = max(1, -(-sum(lengths) // (ranks * limit))), 0
    while tried < _COUNTS:  # 4
        for first in range(0, len(sizes), _SIZES):
            below = math.inf if best is None else seconds_of(best, costs) / count / (1 + _NARROW)
            groups = packer.fastest(ranks * count, sizes[first:], below)
            if groups is not None:
                dealt = _dealt(groups, ranks, count, costs)  # 5
                best = min(best or dealt, dealt, key=lambda plan: seconds_of(plan, costs))
        tried += best is not None
        count += 1
    assert best is not None
    return best


def seconds_of(plan: Sequence[Sequence[Group]], costs: Costs) -> float:
    """Seconds of a plan, if ranks wait for one another at every micro-batch."""
    return sum(max(time_of(group, costs) for group in groups) for groups in plan)


def time_of(group: Group, costs: Costs) -> float:
    """Seconds of a group."""
    return costs.seconds(group.cells, group.pairs, group.size)


def _dealt(groups: list[Group], ranks: int, micro_batches: int, costs: Costs) -> list[list[Group]]:
    """The groups of each micro-batch."""
    by_time = sorted(groups, key=lambda group: -time_of(group, costs))
    for order in (by_time, sorted(groups, key=lambda group: -group.size)):  # the latter always has room
        plan: list[list[Group]] = [[] for _ in range(micro_batches)]
        free = [ranks] * micro_batches
        for group in order:
            place = next((place for place, left in enumerate(free) if left >= group.size), None)
            if place is None:
                break
            plan[place].append(group)
            free[place] -= group.size
        else:
            break
    return [sorted(own, key=lambda group: -group.size) for own in plan]

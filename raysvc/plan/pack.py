"""Packs sequences into rows that they share.

Axes: N sequences, P packs.

1. Take the sequences longest first.
2. Put each into a pack that has room: the first one, the fullest one, or the one of least cost, by packer.
3. Open a new pack where none has room; a sequence over the capacity gets one for itself.
4. Where ranks need more packs, split the costliest one until their number fits (`split_to`).

Always true:
- every sequence is in exactly one pack;
- a pack's sequences, each rounded up to `align`, fit the capacity; only a sequence that does not fit by
  itself is alone in a wider pack;
- the result is a pure function of the lengths, with ties broken by position.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from raysvc.plan.cost import CostModel

Int64s = npt.NDArray[np.int64]
Packs = list[list[int]]

_FULL = -1  # room of a pack that is over the capacity: not even an empty sequence fits


def aligned(lengths: Int64s, align: int) -> Int64s:
    """`lengths` rounded up to multiples of `align`."""
    return -(-lengths // align) * align if align > 1 else lengths


def pack_first_fit(lengths: Int64s, capacity: int, align: int = 1) -> Packs:
    """First-fit-decreasing: longest first (of equal lengths the later one), into the first pack with room."""
    sizes = aligned(lengths, align)
    packs: Packs = []
    room: list[int] = []
    for item in np.lexsort((-np.arange(len(sizes)), -sizes)).tolist():  # 1
        size = int(sizes[item])
        place = next((p for p, free in enumerate(room) if free >= size), None)  # 2
        if place is None:  # 3
            packs.append([item])
            room.append(capacity - size if size <= capacity else _FULL)
        else:
            packs[place].append(item)
            room[place] -= size
    return packs


def pack_best_fit(lengths: Int64s, capacity: int, align: int = 1) -> Packs:
    """Best-fit-decreasing: longest first, into the fullest pack that still has room."""
    sizes = aligned(lengths, align)
    packs: Packs = []
    room: list[tuple[int, int]] = []  # (free tokens, pack), sorted
    for item in np.argsort(-sizes, kind="stable").tolist():  # 1
        size = int(sizes[item])
        place = bisect_left(room, (size, -1))  # 2
        if place == len(room):  # 3
            packs.append([item])
            insort(room, (capacity - size if size <= capacity else _FULL, len(packs) - 1))
        else:
            free, pack = room.pop(place)
            packs[pack].append(item)
            insort(room, (free - size, pack))
    return packs


def spread(lengths: Int64s, num_packs: int, capacity: int, align: int, cost: CostModel) -> Packs | None:
    """Longest first into the pack of least cost that has room; None when some sequence finds no room.

    A sequence over the capacity takes a pack for itself.
    """
    sizes, costs = aligned(lengths, align), cost.of(lengths) + 1  # empty sequences are spread too
    packs: Packs = [[] for _ in range(num_packs)]
    heap = [(0, pack, capacity) for pack in range(num_packs)]  # (cost, pack, free tokens)
    for item in np.argsort(-sizes, kind="stable").tolist():
        size, price = int(sizes[item]), int(costs[item])
        load, pack, free = heap[0]
        if free >= size:
            heapreplace(heap, (load + price, pack, free - size))
        elif free == capacity:
            heapreplace(heap, (load + price, pack, _FULL))
        else:
            found = min((entry for entry in heap if entry[2] >= size), default=None)
            if found is None:
                return None
            load, pack, free = found
            heap[heap.index(found)] = (load + price, pack, free - size)
            heapify(heap)
        packs[pack].append(item)
    return packs


def split_to(packs: Packs, multiple: int, costs: Int64s, *, in_order: bool = False) -> Packs:
    """More packs, until their number is a multiple of `multiple` or no pack has two sequences.

    The costliest pack with two or more sequences is split into two of similar cost, again and again; with
    `in_order` into its first and its second half, so that sequences of similar length stay together.
    """
    heap = [(-int(costs[pack].sum()), number) for number, pack in enumerate(packs) if len(pack) > 1]
    heapify(heap)
    done = list(packs)
    while len(done) % multiple and heap:
        _, number = heappop(heap)
        pack = done[number]
        first, second = (pack[: len(pack) // 2], pack[len(pack) // 2 :]) if in_order else _halves(pack, costs)
        done[number] = first
        done.append(second)
        for place, half in ((number, first), (len(done) - 1, second)):
            if len(half) > 1:
                heappush(heap, (-int(costs[half].sum()), place))
    return done


def _halves(pack: list[int], costs: Int64s) -> tuple[list[int], list[int]]:
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for item in sorted(pack, key=lambda item: (-int(costs[item]), item)):
        side = int((loads[1], len(halves[1])) < (loads[0], len(halves[0])))
        halves[side].append(item)
        loads[side] += int(costs[item])
    return halves

"""Items of known cost to R ranks, the same number for each.

Axes: B items of a rank, R ranks.

1. Deal stripe by stripe: of R items, the costliest goes to the rank that has the least so far.
2. Swap items of the heaviest and the lightest rank while that lowers the heaviest.
3. Sort each rank's items again, costliest first.

Always true:
- every item goes to one rank, and every rank gets B of them, costliest first;
- the items at one place of all ranks cost about the same, but for the few that were swapped;
- no rank costs more than under dealing alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_TOLERANCE = 0.005  # a heaviest rank this much over the mean is not worth a swap
_SWAPS_PER_RANK = 4


def deal_even(items: Int32s, costs: Int64s, num_ranks: int) -> Int32s:
    """int32 [B, R], the items of each rank.

    Args:
        items: int32 [B * R], costliest first.
        costs: int64, cost by item.
        num_ranks: R.
    """
    items_BR = items.reshape(-1, num_ranks)
    if num_ranks == 1:
        return items_BR
    dealt, loads = _deal_stripes(items_BR, costs)  # 1
    if _swap(dealt, costs, loads):  # 2
        order = np.argsort(-costs[dealt], axis=0, kind="stable")  # 3
        dealt = np.take_along_axis(dealt, order, axis=0)
    return dealt


def _deal_stripes(items_BR: Int32s, costs: Int64s) -> tuple[Int32s, Int64s]:
    """Each stripe of R items, costliest first, goes to the R ranks, least loaded first."""
    out = np.empty_like(items_BR)
    costs_BR = costs[items_BR]
    loads = np.zeros(items_BR.shape[1], np.int64)
    for stripe, (items, prices) in enumerate(zip(items_BR, costs_BR, strict=True)):
        ranks = np.argsort(loads, kind="stable")
        out[stripe, ranks] = items
        loads[ranks] += prices
    return out, loads


def _swap(dealt_BR: Int32s, costs: Int64s, loads: Int64s) -> bool:
    """Swap items of the heaviest and the lightest rank, in place, while that lowers the heaviest.

    The pair is the one whose difference in cost is nearest to half of the gap.
    """
    swapped = False
    for _ in range(_SWAPS_PER_RANK * len(loads)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[heavy] - loads[light])
        if loads[heavy] * len(loads) <= (1 + _TOLERANCE) * loads.sum():
            break
        from_heavy, from_light = costs[dealt_BR[:, heavy]], costs[dealt_BR[:, light]]
        by_cost = np.argsort(from_light, kind="stable")
        wanted = from_heavy - gap // 2
        place = np.searchsorted(from_light[by_cost], wanted)
        near = np.stack([np.maximum(place - 1, 0), np.minimum(place, len(by_cost) - 1)])
        difference = from_heavy - from_light[by_cost[near]]
        miss = np.where((difference > 0) & (difference < gap), np.abs(2 * difference - gap), gap)
        best = int(miss.argmin())
        if miss.flat[best] >= gap:
            break
        mine, theirs = best % len(wanted), by_cost[near.flat[best]]
        dealt_BR[mine, heavy], dealt_BR[theirs, light] = dealt_BR[theirs, light], dealt_BR[mine, heavy]
        loads[heavy] -= difference.flat[best]
        loads[light] += difference.flat[best]
        swapped = True
    return swapped

"""How well an order shuffles: `full`, `block(n)` and `window(W)` of the same rows.

    python benchmarks/shuffle.py [--rows 1000000 --slices 500 --seeds 3]

Rows of a document lie side by side in the source, eight of them, as near-duplicates do. Of each order:
- rank correlation: Spearman's, of a row's place in the source and in the epoch; 0 is what a random order has;
- moved: mean distance of these two places, over N; 1/3 for a random order;
- apart: mean distance of two rows of a document in the epoch, over N; 1/3 for a random order;
- together: pairs of rows of a document in one step of `--batch` rows, over the pairs that a random order puts there;
- slices: of a step, and slices that are read before the first step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parent))
from common import show

DOCUMENT = 8
CHUNK = 1 << 16
SHUFFLES = (
    "none",
    "full",
    "block(1024)",
    "block(16384)",
    "window(1)",
    "window(8)",
    "window(16)",
    "window(64)",
)


class EvenSlices:
    """Slices of the same number of groups."""

    are_counted = True

    def __init__(self, num_groups: int, num_slices: int) -> None:
        self.num_groups, self.num_slices = num_groups, num_slices

    def groups_of(self, slices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Groups of each slice."""
        return np.full(len(slices), self.num_groups // self.num_slices)


def order_of(shuffle: str, rows: int, slices: int, seed: int) -> npt.NDArray[np.int64]:
    """Rows in the order of an epoch."""
    from raysvc.plan.order import Order, parse_shuffle
    from raysvc.plan.sliced.window_order import WindowOrder, is_windowed
    from raysvc.row_ids import split

    if not is_windowed(shuffle):
        return Order(rows, seed, parse_shuffle(shuffle)).at(0, np.arange(rows))
    order = WindowOrder(EvenSlices(rows, slices), int(shuffle[7:-1]), seed)
    found = [order.at(0, np.arange(at, min(at + CHUNK, rows))) for at in range(0, rows, CHUNK)]
    place = split(np.concatenate(found))
    return place.slice * (rows // slices) + place.row


def measure(shuffle: str, rows: int, slices: int, batch: int, seed: int) -> dict[str, float]:
    """The figures of one order."""
    order = order_of(shuffle, rows, slices, seed)
    assert np.array_equal(np.sort(order), np.arange(rows)), "every row once"
    place = np.empty(rows, np.int64)
    place[order] = np.arange(rows)
    documents = place.reshape(-1, DOCUMENT)
    gaps = [np.abs(documents[:, a] - documents[:, b]) for a in range(DOCUMENT) for b in range(a)]
    steps = documents // batch
    together = sum(int((steps[:, a] == steps[:, b]).sum()) for a in range(DOCUMENT) for b in range(a))
    expected = len(gaps) * len(documents) * (batch - 1) / (rows - 1)
    some = np.linspace(0, rows // batch - 1, 50).astype(int)
    per_slice = rows // slices
    return {
        "rank correlation": float(np.corrcoef(np.arange(rows), place)[0, 1]),
        "moved": float(np.abs(place - np.arange(rows)).mean() / rows),
        "apart": float(np.mean(gaps) / rows),
        "together": together / expected,
        "slices of a step": float(np.median([len(np.unique(order[k * batch : (k + 1) * batch] // per_slice)) for k in some])),
        "slices of the first": float(len(np.unique(order[:batch] // per_slice))),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--slices", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    table: list[dict[str, Any]] = []
    for shuffle in SHUFFLES:
        found = [
            measure(shuffle, arguments.rows, arguments.slices, arguments.batch, seed)
            for seed in range(arguments.seeds)
        ]
        mean = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
        mean["rank correlation"] = max(abs(one["rank correlation"]) for one in found)
        table.append({"shuffle": shuffle, **{name: round(value, 4) for name, value in mean.items()}})
    show("Shuffles", table)


if __name__ == "__main__":
    main()

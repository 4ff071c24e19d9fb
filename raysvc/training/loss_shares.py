"""The loss of a step by source and by length of the row.

Axes: N rows of a step, over all ranks.
Always true:
- sums of losses and of targets: each is of real rows alone, every row counts in one source and in one bucket of lengths;
- a pair counts once, where its first row does; nobody's loss is a target's then, but a pair's;
- the buckets together are the step's loss where `trainer.loss` is `token_mean`, and for pairs always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from raysvc.actors.worker.results import MiniResult
    from raysvc.builds.cache_entry import CacheEntry

Shares = dict[str, list[float]]  # name -> [sum of losses, targets or pairs]


class LossShares:
    """Sums the rows of steps.

    Args:
        entry: whose rows they are; one of a mixture has several sources.
    """

    def __init__(self, entry: CacheEntry) -> None:
        self._mixed = entry if entry.sources else None

    def of(self, results: Sequence[Sequence[MiniResult]]) -> dict[str, Any]:
        """`by_source` (of a mixture) and `by_length` (rows of at most so many tokens); {} where workers do not say.

        Args:
            results: results[dp rank][optimizer step].
        """
        rows = [mini.rows for rank in results for mini in rank]
        known = [values for values in rows if values is not None]
        if not known or len(known) < len(rows):
            return {}
        losses = np.concatenate([values.rows["loss"] for values in known]).astype(np.float64)
        targets = np.concatenate([values.rows["targets"] for values in known])
        found: dict[str, Any] = {}
        if self._mixed is not None:
            names = np.array(self._mixed.sources_of(np.concatenate([values.row_ids for values in known])))
            found["by_source"] = _sums(names, losses, targets)
        lengths = np.concatenate([values.lengths for values in known])
        found["by_length"] = _sums(length_bucket(lengths), losses, targets)
        return found


def length_bucket(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The smallest power of two that is not below each length."""
    return np.asarray(2 ** np.ceil(np.log2(np.maximum(lengths, 1))), np.int64)


def _sums(names: npt.NDArray[Any], losses: npt.NDArray[np.float64], targets: npt.NDArray[Any]) -> Shares:
    known, number = np.unique(names, return_inverse=True)
    sums = np.bincount(number, losses, len(known))
    counts = np.bincount(number, targets, len(known)).astype(np.int64)
    shares = zip(known.tolist(), sums.tolist(), counts.tolist(), strict=True)
    return {str(name): [round(each, 6), count] for name, each, count in shares}

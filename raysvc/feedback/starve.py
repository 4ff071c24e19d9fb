"""Which sources of a mixture get nothing more, by their losses. Pure.

Always true:
- the answer follows from the weights, the losses and the factor alone;
- a source is starved when its mean loss is above the factor times the median of those of the others that still come;
- one source is left at least, and a source of which nothing was trained is not judged;
- a loss of NaN is above every other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping


def starved(
    weights: Mapping[str, float], losses: Mapping[str, tuple[float, int]], above: float
) -> dict[str, float] | None:
    """Weights without the sources that are too bad; None: they stay as they are.

    Args:
        weights: of all sources.
        losses: source -> sum of losses, and the targets (or pairs) that they are of.
        above: the factor.
    """
    means = {
        name: _mean(*losses[name])
        for name, weight in weights.items()
        if weight > 0 and losses.get(name, (0.0, 0))[1] > 0
    }
    bad = [name for name, mean in means.items() if not _is_fit(name, mean, means, above)]
    left = {name: 0.0 if name in bad else weight for name, weight in weights.items()}
    return left if bad and any(left.values()) else None


def _mean(total: float, targets: int) -> float:
    return math.inf if math.isnan(total) else total / targets


def _is_fit(name: str, mean: float, means: Mapping[str, float], above: float) -> bool:
    others = [other for each, other in means.items() if each != name]
    return not others or mean <= above * statistics.median(others)

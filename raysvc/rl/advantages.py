"""Advantages from rewards, normalised without ever counting padding or dummies. Pure numpy.

Axes: S sequences.

    group       A_s = (r_s - mean of its group) / (std of its group + eps)        (GRPO, arXiv:2402.03300)
    leave-out   A_s = r_s - mean of the other sequences of its group              (RLOO, arXiv:2402.14740)
Always true:
- a sequence with group -1 (a dummy) counts nowhere and gets 0.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def group_advantages(
    rewards: npt.NDArray[Any],
    groups: npt.NDArray[Any],
    how: Literal["group", "mean_only", "leave_out"] = "group",
    eps: float = 1e-6,
) -> Floats:
    """float64 [S], one advantage per sequence.

    Args:
        rewards: [S].
        groups: int [S], number of each sequence's group; -1 for a dummy. `Shard.arrays["row_group"]` fits when a
            rank holds whole groups; else number the groups over the whole mini-batch.
        how: `mean_only` leaves the division out; a group of one gets 0.
        eps: added to the standard deviation.
    """
    values, number = np.asarray(rewards, np.float64), np.asarray(groups, np.int64)
    real = number >= 0
    index = np.where(real, number, 0)
    size = int(index.max(initial=0)) + 1
    counts = np.maximum(np.bincount(index, real, size), 1)
    means = np.bincount(index, np.where(real, values, 0), size) / counts
    centred: Floats = np.where(real, values - means[index], 0.0)
    if how == "mean_only":
        return centred
    if how == "leave_out":
        scale: Floats = counts / np.maximum(counts - 1, 1)
        return centred * scale[index]
    stds = np.sqrt(np.bincount(index, centred**2, size) / counts)
    out: Floats = centred / (stds[index] + eps)
    return out

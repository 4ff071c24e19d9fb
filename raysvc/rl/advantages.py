"""Advantages from rewards, normalised without ever counting padding or dummies. Pure numpy.

Axes: S sequences, B lines, W columns, T trained tokens of all of them.

    group       A_s = (r_s - mean of its group) / (std of its group + eps)        (GRPO, arXiv:2402.03300)
    leave-out   A_s = r_s - mean of the other sequences of its group              (RLOO, arXiv:2402.14740)
    whitened    A_t = (a_t - mean_T) / (std_T + eps), over trained tokens alone
Always true:
- a sequence with group -1 (a dummy) counts nowhere and gets 0;
- `Moments` of parts add up to the moments of the whole, so ranks and micro-batches agree exactly.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Moments(NamedTuple):
    """Number, sum and sum of squares of some values."""

    num: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: npt.NDArray[Any], mask: npt.NDArray[Any]) -> Moments:
        """Of the values [B, W] where `mask` is not 0."""
        real = np.asarray(values, np.float64)[np.asarray(mask) != 0]
        return cls(len(real), float(real.sum()), float((real * real).sum()))

    def plus(self, other: Moments) -> Moments:
        """Of both together."""
        return Moments(self.num + other.num, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """0 for no numbers."""
        return self.total / max(self.num, 1)

    @property
    def std(self) -> float:
        """Of the population; 0 for no numbers."""
        return float(np.sqrt(max(self.squares / max(self.num, 1) - self.mean**2, 0.0)))


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


def whitened(
    values: npt.NDArray[Any], mask: npt.NDArray[Any], moments: Moments | None = None, eps: float = 1e-6
) -> Floats:
    """float64 [B, W], zero mean and unit deviation over the cells where `mask` is not 0; 0 elsewhere.

    Args:
        moments: of the whole mini-batch, where this is a part of it; None: of these values.
    """
    whole = Moments.of(values, mask) if moments is None else moments
    scaled = (np.asarray(values, np.float64) - whole.mean) / (whole.std + eps)
    return np.where(np.asarray(mask) != 0, scaled, 0.0)

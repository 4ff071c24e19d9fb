"""Advantages from rewards, normalised without ever counting padding or dummies. Pure numpy.

Axes: S sequences.

    group       A_s = (r_s - mean of its group) / (std of its group + eps)        (GRPO, arXiv:2402.03300)
    leave-out   A_s = r_s - mean of the other sequences of its group              (RLOO, arXiv:2402.14740)
    mean_only   A_s = r_s - mean of its group                                     (Dr. GRPO, arXiv:2503.20783)
Always true:
- a trajectory of several sequences counts once, with the reward of its last one, and gives all of them its advantage;
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
    std: Literal["sample", "population"] = "sample",
    trajectories: npt.NDArray[Any] | None = None,
    order: npt.NDArray[Any] | None = None,
) -> Floats:
    """float64 [S], one advantage per sequence.

    Args:
        rewards: [S].
        groups: int [S], number of each sequence's group; -1 for a dummy. `Shard.arrays["row_group"]` fits when a
            rank holds whole groups; else number the groups over the whole mini-batch.
        how: `mean_only` leaves the division out. A group of one gets 0, as in TRL; verl and SkyRL give it its reward.
        eps: added to the standard deviation; verl and SkyRL have 1e-6 too, TRL 1e-4.
        std: `sample` divides the squares by n - 1 (Bessel), as TRL (`nanstd`), verl and SkyRL (`torch.std`) do;
            `population` by n, which makes advantages larger, of groups of two by a factor of 1.41.
        trajectories: int [S], number of each sequence's trajectory in its group; None: each is its own.
        order: int [S], of the sequences of a trajectory the one with the highest number is the last: `Shard.row_ids`, since a
            shard has its rows in the order of their lengths. None: they stand in their order.
    """
    if order is not None:
        by = np.argsort(order, kind="stable")
        numbers = None if trajectories is None else np.asarray(trajectories)[by]
        out = np.empty(len(by))
        out[by] = group_advantages(np.asarray(rewards)[by], np.asarray(groups)[by], how, eps, std, numbers)
        return out
    if trajectories is not None:
        own = np.stack([np.asarray(groups, np.int64), np.asarray(trajectories, np.int64)])
        backwards, last, of_row = np.unique(own[:, ::-1], axis=1, return_index=True, return_inverse=True)
        final = np.asarray(rewards)[::-1][last]  # of the last sequence of each trajectory
        return group_advantages(final, backwards[0], how, eps, std)[of_row.reshape(-1)[::-1]]
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
    divisors = np.maximum(counts - 1, 1) if std == "sample" else counts
    stds = np.sqrt(np.bincount(index, centred**2, size) / divisors)
    normed: Floats = centred / (stds[index] + eps)
    return normed


def overlong_penalty(lengths: npt.NDArray[Any], longest: int, buffer: int) -> Floats:
    """float64 [S], what DAPO adds to the rewards of long answers (arXiv:2503.14476, eq. 13): 0 to `longest - buffer` tokens, from there
    down to -1 at `longest`, and -1 beyond.

    To leave rows that were cut at the limit out of the loss instead, put them with a loss_mask of zeros.

    Args:
        lengths: [S], tokens of each answer.
        longest: tokens that an answer may have.
        buffer: tokens over which the penalty grows.
    """
    over = np.asarray(lengths, np.float64) - (longest - buffer)
    penalty: Floats = -np.clip(over / max(buffer, 1e-9), 0.0, 1.0)
    return penalty
